// One warp's attention of kTiles times 16 query rows over a stream of keys: scores, running softmax, sums of values.
#pragma once

#include <math_constants.h>

#include "kernels/common/mma.cuh"
#include "kernels/common/vector.cuh"
#include "stream.cuh"

namespace replayssm {

// Row g of a tile is element 0, row g + 8 element 1 of what is kept by row.
template <class Act, int kSize, int kTiles>
struct QueryTiles {
  static constexpr int kChunks = kSize / 32, kColumns = kSize / 8;
  static constexpr int kQueryPieces = kTiles * kChunks * 2;

  const uint4* query;                // [kTiles][kChunks][2][lane] in shared memory: channels 32 j + 8 c ..+7
  float sum[kTiles][kColumns][4];    // columns 64 (n / 8) + 16 c + n % 8, and the same + 8
  float maximum[kTiles][2], weight[kTiles][2];
  int last[kTiles][2];               // the last position a row sees; -1: none

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[t][n][i] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        maximum[t][i] = -CUDART_INF_F;
        weight[t][i] = 0.0f;
      }
    }
  }

  // Scores of the tile's keys in log2 units: column 8 n + 2 c + i of rows g and g + 8 in elements i and 2 + i.
  template <class Stream>
  __device__ __forceinline__ void scores(const Stream& stream, int stage, int position, float scale,
                                         float (&s)[kTiles][2][4]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[t][i / 4][i % 4] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const uint4 keys[2] = {*stream.at(stage, j), *stream.at(stage, kChunks + j)};
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4* from = query + (t * kChunks + j) * 2 * 32 + stream.lane;
        const uint4 low = from[0], high = from[32];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          mmaAct<Act>(s[t][n], {low.x, high.x, low.y, high.y}, keys[n].x, keys[n].y);
          mmaAct<Act>(s[t][n], {low.z, high.z, low.w, high.w}, keys[n].z, keys[n].w);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = position + 8 * n + 2 * (stream.lane % 4);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[t][n][i] = column + i % 2 <= last[t][i / 2] ? s[t][n][i] * scale : -CUDART_INF_F;
        }
      }
    }
  }

  // Scores become weights relative to the new maximum; the sums follow it.
  __device__ __forceinline__ void rescale(float (&s)[kTiles][2][4]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = fmaxf(fmaxf(s[t][0][2 * i], s[t][0][2 * i + 1]), fmaxf(s[t][1][2 * i], s[t][1][2 * i + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)), maximum[t][i]);
        const float base = top == -CUDART_INF_F ? 0.0f : top;  // nothing seen yet
        factor[i] = exp2f(maximum[t][i] - base);
        maximum[t][i] = top;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            s[t][n][2 * i + k] = exp2f(s[t][n][2 * i + k] - base);
            total += s[t][n][2 * i + k];
          }
        }
        weight[t][i] = weight[t][i] * factor[i] + total;  // of this lane's columns
      }
      if (__any_sync(0xffffffffu, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[t][n][i] *= factor[i / 2];
        }
      }
    }
  }

  // sum += weights times values.
  template <class Stream>
  __device__ __forceinline__ void accumulate(const Stream& stream, int stage, const float (&s)[kTiles][2][4]) {
    uint32_t p[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[t][i] = packPair<Act>(s[t][i / 2][i % 2 * 2], s[t][i / 2][i % 2 * 2 + 1]);
    }
#pragma unroll
    for (int j = 0; j < Stream::kValueBlocks; ++j) {
      uint32_t v[4][4];  // of four positions: channels 64 j + 8 g ..+7
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint4 word = *stream.at(stage, Stream::kKeyPieces + 4 * j + k);
        v[k][0] = word.x;
        v[k][1] = word.y;
        v[k][2] = word.z;
        v[k][3] = word.w;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t half = i % 2 ? 0x7632u : 0x5410u;
        const uint32_t b0 = __byte_perm(v[0][i / 2], v[1][i / 2], half);
        const uint32_t b1 = __byte_perm(v[2][i / 2], v[3][i / 2], half);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) mmaAct<Act>(sum[t][8 * j + i], p[t], b0, b1);
      }
    }
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weight[t][i] += __shfl_xor_sync(0xffffffffu, weight[t][i], 1);
        weight[t][i] += __shfl_xor_sync(0xffffffffu, weight[t][i], 2);
      }
    }
  }
};

}  // namespace replayssm
