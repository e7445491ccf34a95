// The read-out of one warp's 16 state rows for a plain GDN step: the state times one key and one query, by float32 FMA.
// Lane (g, c) = (lane / 4, lane % 4) holds rows g and g + 8 and, of each block of 32 columns, columns 8c..8c+7.
#pragma once

#include "../replay_update/readout.cuh"

namespace replayssm::weighed {

template <class Traits>
struct PlainVectors {
  uint32_t words[2][Traits::kBlocks][4];  // key, query; packed, halves swapped on odd rows as the state is read

  // Both rows in shared memory.
  __device__ void load(const char* keyRow, const char* queryRow, int lane) {
    fetchRow(words[0], keyRow, lane);
    fetchRow(words[1], queryRow, lane);
  }

  static __device__ void fetchRow(uint32_t (&v)[Traits::kBlocks][4], const char* row, int lane) {
    const int swap = lane & 4;
#pragma unroll
    for (int b = 0; b < Traits::kBlocks; ++b) {
      const char* at = row + b * 64 + lane % 4 * 16;
      uint2 x = *reinterpret_cast<const uint2*>(at + swap * 2);
      uint2 y = *reinterpret_cast<const uint2*>(at + (4 - swap) * 2);
      v[b][0] = x.x;
      v[b][1] = x.y;
      v[b][2] = y.x;
      v[b][3] = y.y;
    }
  }

  // sum = (S k, S q) of row g, then of row g + 8; every lane of a row has them.
  __device__ void read(float (&sum)[1][4], const float* slab, int lane) const {
    using A = Activation<typename Traits::Act>;
    const bool odd = (lane & 4) != 0;
    const float* row = slab + (lane / 4) * Traits::kStateDim + (lane % 4) * 8;
    float part[2][2][2] = {};  // row, vector, half of the columns
#pragma unroll
    for (int b = 0; b < Traits::kBlocks; ++b) {
      float u[2][8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        u[i / 4][i % 4 * 2] = A::low(words[i / 4][b][i % 4]);
        u[i / 4][i % 4 * 2 + 1] = A::high(words[i / 4][b][i % 4]);
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
};

}  // namespace replayssm::weighed
