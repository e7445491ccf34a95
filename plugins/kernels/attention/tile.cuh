// One warp's attention of kTiles times 8 query rows over tiles of keys and values: scores, running softmax, sums of
// values. Everything is transposed: keys are the rows of the scores' products, channels those of the sums', queries
// the columns, so that the few queries of a decode step waste no more than the rest of eight.
#pragma once

#include <math_constants.h>

#include "kernels/common/mma.cuh"
#include "kernels/common/vector.cuh"
#include "stream.cuh"

namespace replayssm {

constexpr int kTileKeys = 16;  // positions that a warp multiplies at once

// The address in a tile of kRows rows (see tilePlace) of chunk 2 j + half, from that of chunk `half` of the same row.
template <int kRows>
__device__ __forceinline__ uint32_t stepPlace(uint32_t first, int j) {
  return (first ^ 32 * (j % 4)) + kRows * kPanelRowBytes * (j / 4);
}

__device__ __forceinline__ float exp2Fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// What weights are relative to: a score near the largest of its row, in log2 units. It moves when a score is more than
// kMaximumSlack above it, rarely after the first keys: weights stay below 2^kMaximumSlack, exact to the same share, and sums
// need not follow every new maximum. Whether it moved.
constexpr float kMaximumSlack = 8.0f;
__device__ __forceinline__ bool keepMaximum(float& kept, float top) {
  const bool moves = top > kept + kMaximumSlack;  // from -inf too
  kept = moves ? top : kept;
  return moves;
}
// Nothing seen yet: no score is above -inf, whatever it is relative to.
__device__ __forceinline__ float finiteMaximum(float kept) { return kept == -CUDART_INF_F ? 0.0f : kept; }

// Four 8x8 matrices of 16-bit elements; lane l has the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void loadMatrices(uint32_t (&m)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void loadTransposed(uint32_t (&m)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// With g = lane / 4 and c = lane % 4, queries 8 t + 2 c + i are what a lane keeps by query, element [t][i].
template <class Act, int kSize, int kTiles>
struct QueryTiles {
  static constexpr int kSteps = kSize / 16;  // of 16 channels
  static constexpr int kChains = kTiles > 2 ? 1 : 4 / kTiles;  // products under way at once

  uint32_t query[kTiles][kSteps][2];  // operand B of k q^T
  float sum[kTiles][kSteps][4];       // channels 16 j + g (elements 0, 1) and + 8 (2, 3) of queries 2 c, 2 c + 1
  float maximum[kTiles][2], weight[kTiles][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[t][j][i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        maximum[t][i] = -CUDART_INF_F;
        weight[t][i] = 0.0f;
      }
    }
  }

  // Queries, a part of a tile of kRows rows (see tilePlace).
  template <int kRows>
  __device__ __forceinline__ void loadQueries(uint32_t rows) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    rows += tilePlace<kRows>(lane % 8, lane / 8);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < kSteps; j += 2) {
        uint32_t m[4];
        loadMatrices(m, stepPlace<kRows>(rows, j) + 8 * t * kPanelRowBytes);
        query[t][j][0] = m[0];
        query[t][j][1] = m[1];
        query[t][j + 1][0] = m[2];
        query[t][j + 1][1] = m[3];
      }
    }
  }

  // Scores of the tile's keys in log2 units: key g + 8 h of query 2 c + i in element 2 h + i.
  __device__ __forceinline__ void scores(uint32_t keys, float scale, float (&s)[kTiles][4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t rows = keys + tilePlace<kTileKeys>(lane % 16, lane / 16);
    float part[kChains][kTiles][4];
#pragma unroll
    for (int k = 0; k < kChains; ++k) {
#pragma unroll
      for (int i = 0; i < 4 * kTiles; ++i) part[k][i / 4][i % 4] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      uint32_t m[4];
      loadMatrices(m, stepPlace<kTileKeys>(rows, j));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mmaAct<Act>(part[j % kChains][t], m, query[t][j][0], query[t][j][1]);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[t][i] = part[0][t][i];
#pragma unroll
        for (int k = 1; k < kChains; ++k) s[t][i] += part[k][t][i];
        s[t][i] *= scale;
      }
    }
  }

  // Scores become weights relative to the maximum that is kept; where that moves, the sums follow it.
  __device__ __forceinline__ void rescale(float (&s)[kTiles][4]) {
    float factor[kTiles][2];
    bool moves = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = fmaxf(s[t][i], s[t][2 + i]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        factor[t][i] = maximum[t][i];
        moves |= keepMaximum(maximum[t][i], top);
        const float base = finiteMaximum(maximum[t][i]);
        s[t][i] = exp2Fast(s[t][i] - base);
        s[t][2 + i] = exp2Fast(s[t][2 + i] - base);
      }
    }
    if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          factor[t][i] = exp2Fast(factor[t][i] - finiteMaximum(maximum[t][i]));
          weight[t][i] *= factor[t][i];
        }
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[t][j][i] *= factor[t][i % 2];
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) weight[t][i] += s[t][i] + s[t][2 + i];  // of this lane's keys
    }
  }

  // sum += weights times values.
  __device__ __forceinline__ void accumulate(uint32_t values, const float (&s)[kTiles][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const uint32_t rows = values + tilePlace<kTileKeys>(lane % 8 + 8 * (lane / 16), lane / 8 % 2);
    uint32_t p[kTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) p[t][h] = transposed(packPair<Act>(s[t][2 * h], s[t][2 * h + 1]));
    }
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      uint32_t m[4];
      loadTransposed(m, stepPlace<kTileKeys>(rows, j));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mmaAct<Act>(sum[t][j], m, p[t][0], p[t][1]);
    }
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          weight[t][i] += __shfl_xor_sync(0xffffffffu, weight[t][i], step);
        }
      }
    }
  }
};

}  // namespace replayssm
