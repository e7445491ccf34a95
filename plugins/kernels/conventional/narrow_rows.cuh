// Register layout for small batches: eight lanes a row. Lane (g, c) = (lane / 8, lane % 8) has rows g, g + 4, ... and
// columns 4c..4c+3 of every 32: an access is four lines of 128 bytes, and a row sum takes three exchanges, after which
// the row's eight lanes all have it. Shortest chain from load to store.
#pragma once

#include "../common/store_again.cuh"
#include "block.cuh"

namespace replayssm {

// Over the eight lanes of a row.
__device__ __forceinline__ float rowSum(float v) {
  v += __shfl_xor_sync(kFullWarp, v, 4);
  v += __shfl_xor_sync(kFullWarp, v, 2);
  return v + __shfl_xor_sync(kFullWarp, v, 1);
}

template <class BlockType>
struct NarrowRows {
  using Act = typename BlockType::Act;
  static constexpr int kPieces = kConventionalStateDim / 32;  // 16-byte pieces of a row that a lane has
  static constexpr int kOwn = BlockType::kRows / 4;           // rows of a lane
  struct Columns {
    float4 part[kPieces];
  };
  using Rows = Columns[kOwn];
  using Outputs = float[kOwn];
  struct Token {
    uint2 k[kPieces], q[kPieces];  // packed
    uint16_t value[kOwn];
    float dt, beta;
  };
  const BlockType& block;

  __device__ float* place(const StateTensor& states, int slot) const {
    return block.state(states, slot) + block.lane / 8 * kConventionalStateDim + block.lane % 8 * 4;
  }

  static __device__ void read(Rows& s, const float* at) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) s[own].part[i] = *reinterpret_cast<const float4*>(at + offset(own, i));
    }
  }

  static __device__ void write(float* at, const Rows& s) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) *reinterpret_cast<float4*>(at + offset(own, i)) = s[own].part[i];
    }
  }

  // kQuery: whether the token has a query.
  template <bool kQuery>
  __device__ Token load(const TokenInputs& inputs, int token) const {
    Token in{};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      in.k[i] = loadInput(block.vector(inputs.k, token) + block.lane % 8 + i * 8);
      if constexpr (kQuery) in.q[i] = loadInput(block.vector(inputs.q, token) + block.lane % 8 + i * 8);
    }
#pragma unroll
    for (int own = 0; own < kOwn; ++own) in.value[own] = loadInput(block.values(inputs.value, token) + rowOf(own));
    in.dt = block.scalar(inputs.dt, token);
    if constexpr (BlockType::kGdn) in.beta = block.scalar(inputs.beta, token);
    return in;
  }

  // Applies the token to the rows; `out` is set where the token has a query.
  template <bool kQuery>
  __device__ void apply(Rows& s, Outputs& out, const Token& in, float a, float skip) const {
    const Columns k = columns(in.k), q = columns(in.q);
    const float decay = expf(BlockType::kGdn ? in.dt : in.dt * a);
    float keyScale = 1.0f, queryScale = 1.0f, coupling = 0.0f;
    if constexpr (BlockType::kGdn) {
      keyScale = rsqrtf(product(k, k) + kNormEps);
      if constexpr (kQuery) {
        queryScale = rsqrtf((product(q, q) + kNormEps) * kConventionalStateDim);
        coupling = product(k, q) * keyScale * queryScale;
      }
    }
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const float value = Activation<Act>::toFloat(in.value[own]);
      if constexpr (BlockType::kGdn) {
        const float correction = in.beta * (value - product(s[own], k) * decay * keyScale);
        if constexpr (kQuery) out[own] = fmaf(correction, coupling, product(s[own], q) * decay * queryScale);
        update(s[own], decay, correction * keyScale, k);
      } else {
        update(s[own], decay, in.dt * value, k);
        if constexpr (kQuery) out[own] = fmaf(skip, value, product(s[own], q));
      }
    }
  }

  __device__ void store(int token, const Outputs& out) const {
    if (block.lane % 8 != 0) return;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      storeAgain(block.out(token) + rowOf(own), Activation<Act>::fromFloat(out[own]));
    }
  }

 private:
  static __device__ constexpr int offset(int own, int piece) { return own * 4 * kConventionalStateDim + piece * 32; }
  __device__ int rowOf(int own) const { return own * 4 + block.lane / 8; }

  static __device__ Columns columns(const uint2 (&packed)[kPieces]) {
    Columns c;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) c.part[i] = unpack<Act>(packed[i]);
    return c;
  }

  static __device__ float product(const Columns& x, const Columns& y) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) sum = dot(x.part[i], y.part[i], sum);
    return rowSum(sum);
  }

  static __device__ void update(Columns& row, float decay, float weight, const Columns& k) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) addScaled(row.part[i], decay, weight, k.part[i]);
  }
};

}  // namespace replayssm
