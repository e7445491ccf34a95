// The read-out of one warp's 16 state rows for a plain GDN step: the state times one key and one query, by float32 FMA.
// Lane (g, c) = (lane / 4, lane % 4) holds rows g and g + 8 and, of each block of 32 columns, columns 8c..8c+7.
#pragma once

#include "../replay_update/readout.cuh"

namespace replayssm::weighed {

// The lane's eight elements of a block, halves swapped on odd rows as the state is read.
__device__ __forceinline__ void fetchBlock(uint32_t (&words)[4], const char* at, int lane) {
  const int swap = lane & 4;
  const uint2 x = *reinterpret_cast<const uint2*>(at + swap * 2), y = *reinterpret_cast<const uint2*>(at + (4 - swap) * 2);
  words[0] = x.x;
  words[1] = x.y;
  words[2] = y.x;
  words[3] = y.y;
}

// sum = (S k, S q) of row g, then of row g + 8; every lane of a row has them. S at `slab`, key and query in shared memory.
template <class Traits, int kUnroll>
__device__ __forceinline__ void multiplyByPair(float (&sum)[1][4], const float* slab, const char* key, const char* query,
                                               int lane) {
  using A = Activation<typename Traits::Act>;
  const bool odd = (lane & 4) != 0;
  const float* row = slab + (lane / 4) * Traits::kStateDim + (lane % 4) * 8;
  float part[2][2][2] = {};  // row, vector, half of the columns
#pragma unroll kUnroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    float u[2][8];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      uint32_t words[4];
      fetchBlock(words, (v == 0 ? key : query) + b * kBlock * 2 + lane % 4 * 16, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u[v][2 * i] = A::low(words[i]);
        u[v][2 * i + 1] = A::high(words[i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* at = row + half * 8 * Traits::kStateDim + b * kBlock;
      float4 x = *reinterpret_cast<const float4*>(at + (odd ? 4 : 0));
      float4 y = *reinterpret_cast<const float4*>(at + (odd ? 0 : 4));
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        float* sums = part[half][v];
        sums[0] = fmaf(x.w, u[v][3], fmaf(x.z, u[v][2], fmaf(x.y, u[v][1], fmaf(x.x, u[v][0], sums[0]))));
        sums[1] = fmaf(y.w, u[v][7], fmaf(y.z, u[v][6], fmaf(y.y, u[v][5], fmaf(y.x, u[v][4], sums[1]))));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float total = part[i / 2][i % 2][0] + part[i / 2][i % 2][1];
    total += __shfl_xor_sync(kAllLanes, total, 1);
    sum[0][i] = total + __shfl_xor_sync(kAllLanes, total, 2);
  }
}

}  // namespace replayssm::weighed
