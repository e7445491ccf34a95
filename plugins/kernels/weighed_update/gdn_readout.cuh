// The read-out of one warp's 16 state rows for several tokens of GDN: the state times the step's keys and queries, on tensor
// cores. The float32 state is split in two tf32 parts, so a product loses at most 2^-21 of its value; activations are exact.
// Lane (g, c) = (lane / 4, lane % 4) holds rows g and g + 8 and, of each block of 32 columns, columns 8c..8c+7.
//
// A loop over the blocks: straight-line code is fetched more slowly than it runs.
#pragma once

#include "../replay_update/readout.cuh"

namespace replayssm::weighed {

template <class Traits>
struct StateProduct {
  // High parts of the state, then low ones; but for two tiles, whose sums are enough to keep the matrix units busy, even and
  // odd steps of each: none waits for another.
  static constexpr int kTurns = Traits::kTiles == 2 ? 1 : 2;
  float part[Traits::kTiles][2 * kTurns][4];

  // Adds a block: `state` points at the lane's columns of row g, words at those of the lane's vectors.
  __device__ void add(const float* state, const uint4 (&words)[Traits::kTiles]) {
    using A = Activation<typename Traits::Act>;
    float s[2][8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* at = state + half * 8 * Traits::kStateDim;
      *reinterpret_cast<float4*>(&s[half][0]) = *reinterpret_cast<const float4*>(at);
      *reinterpret_cast<float4*>(&s[half][4]) = *reinterpret_cast<const float4*>(at + 4);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Split split = splitTf32Short(s[e & 1][i + (e & 2) * 2]);
        high[e] = split.high;
        low[e] = split.low;
      }
#pragma unroll
      for (int tile = 0; tile < Traits::kTiles; ++tile) {
        const uint32_t near = i < 2 ? words[tile].x : words[tile].y, far = i < 2 ? words[tile].z : words[tile].w;
        const uint32_t b0 = __float_as_uint(i & 1 ? A::high(near) : A::low(near));
        const uint32_t b1 = __float_as_uint(i & 1 ? A::high(far) : A::low(far));
        mmaTf32(part[tile][i % kTurns], high, b0, b1);
        mmaTf32(part[tile][kTurns + i % kTurns], low, b0, b1);
      }
    }
  }
};

// sum = the state, at `slab`, times keys (even vectors) and queries (odd ones), rows in shared memory. Vectors from `tokens` on
// repeat the last token's.
template <class Traits, int kUnroll>
__device__ __forceinline__ void multiplyState(float (&sum)[Traits::kTiles][4], const float* slab, const char* keys,
                                              const char* queries, int tokens, int lane) {
  const char* vectors[Traits::kTiles];
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
    const int token = min(4 * tile + lane / 8, tokens - 1);
    vectors[tile] = (lane & 4 ? queries : keys) + token * Traits::kKeyPitch + lane % 4 * 16;
  }
  const float* state = slab + lane / 4 * Traits::kStateDim + lane % 4 * 8;
  StateProduct<Traits> product{};
#pragma unroll kUnroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    uint4 words[Traits::kTiles];
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      words[tile] = *reinterpret_cast<const uint4*>(vectors[tile] + b * kBlock * 2);
    }
    product.add(state + b * kBlock, words);
  }
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum[tile][e] = product.part[tile][0][e] + product.part[tile][1][e];
      if constexpr (StateProduct<Traits>::kTurns == 2) sum[tile][e] += product.part[tile][2][e] + product.part[tile][3][e];
    }
  }
}

}  // namespace replayssm::weighed
