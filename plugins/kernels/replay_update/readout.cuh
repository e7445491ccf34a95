// Output-only evaluation of one warp's 16 state rows (paper, Eq. 6).
//
// Several tokens: tensor cores; the float32 state is split in two tf32 parts, so a product loses at most 2^-21 of its
// value, and activations are exact in tf32. One token has kernels of its own: a column in eight of a matrix instruction
// would be used. Lane (g, c) = (lane / 4, lane % 4) holds rows g and g + 8 and, of each block of 32 columns, columns 8c..8c+7.
#pragma once

#include "../common/activation.cuh"
#include "../common/mma.cuh"
#include "decay.cuh"
#include "not_finite.cuh"
#include "traits.cuh"

namespace replayssm {

// Vectors over N elements, in tiles of 8: lane (g, c) holds elements 8c..8c+7 of every block of each tile's vector g.
template <class Traits>
struct Vectors {
  uint4 part[Traits::kTiles][Traits::kBlocks];

  // Row v of tokens * kVectorsPerToken ones is token v, or (GDN) token v / 2's key, then query; zero from `tokens` on.
  __device__ void load(const char* keys, const char* queries, int tokens, int lane) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const int vector = tile * 8 + lane / 4;
      const int token = vector / Traits::kVectorsPerToken;
      const char* rows = Traits::kGdn && vector % 2 == 0 ? keys : queries;
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) {
        part[tile][b] = make_uint4(0, 0, 0, 0);
        if (token < tokens) {
          part[tile][b] = *reinterpret_cast<const uint4*>(rows + token * Traits::kKeyPitch + b * 64 + (lane % 4) * 16);
        }
      }
    }
  }
};

// The lane's eight columns of one state row. Neighbouring rows share banks, so odd rows read their halves in the other
// order; that keeps the eight lanes of a phase on distinct banks.
__device__ __forceinline__ void loadColumns(float (&s)[8], const float* at, int lane) {
  const bool odd = (lane & 4) != 0;
  float4 x = *reinterpret_cast<const float4*>(at + (odd ? 4 : 0));
  float4 y = *reinterpret_cast<const float4*>(at + (odd ? 0 : 4));
  s[0] = odd ? y.x : x.x;
  s[1] = odd ? y.y : x.y;
  s[2] = odd ? y.z : x.z;
  s[3] = odd ? y.w : x.w;
  s[4] = odd ? x.x : y.x;
  s[5] = odd ? x.y : y.y;
  s[6] = odd ? x.z : y.z;
  s[7] = odd ? x.w : y.w;
}

// sum = S q for the warp's rows; `slab` points at its first row in shared memory.
template <class Traits>
__device__ __forceinline__ void readState(float (&sum)[Traits::kTiles][4], const float* slab,
                                          const Vectors<Traits>& q, int lane) {
  using A = Activation<typename Traits::Act>;
  float part[Traits::kTiles][4][4] = {};
  const float* row = slab + (lane / 4) * Traits::kStateDim + (lane % 4) * 8;
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    float s[2][8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      loadColumns(s[half], row + half * 8 * Traits::kStateDim + b * kBlock, lane);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = s[e & 1][i + (e & 2) * 2];
        const Split split = splitTf32(x);
        high[e] = split.high;
        low[e] = split.low;
      }
#pragma unroll
      for (int tile = 0; tile < Traits::kTiles; ++tile) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(&q.part[tile][b]);
        float b0 = i & 1 ? A::high(words[i / 2]) : A::low(words[i / 2]);
        float b1 = i & 1 ? A::high(words[2 + i / 2]) : A::low(words[2 + i / 2]);
        mmaTf32(part[tile][i & 1], high, __float_as_uint(b0), __float_as_uint(b1));
        mmaTf32(part[tile][2 + (i & 1)], low, __float_as_uint(b0), __float_as_uint(b1));
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum[tile][e] = (part[tile][0][e] + part[tile][1][e]) + (part[tile][2][e] + part[tile][3][e]);
    }
  }
}

// dot[e] = <vector, k of record> for vectors g, g, g + 8, g + 8 of a pair of tiles and records first + 2c and
// first + 2c + 1, twice.
// Records from `count` on repeat the last one; the caller masks them.
template <class Traits>
__device__ __forceinline__ void keyDots(float (&dot)[4], const char* keys, int first, int count,
                                        const Vectors<Traits>& q, int pair, int lane) {
  const char* row = keys + min(first + lane / 4, count - 1) * Traits::kKeyPitch + (lane % 4) * 16;
  float second[4] = {};
#pragma unroll
  for (int e = 0; e < 4; ++e) dot[e] = 0.0f;
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    uint4 key = *reinterpret_cast<const uint4*>(row + b * 64);
    uint4 lower = q.part[2 * pair][b];
    uint4 upper = make_uint4(0, 0, 0, 0);
    if (2 * pair + 1 < Traits::kTiles) upper = q.part[2 * pair + 1 < Traits::kTiles ? 2 * pair + 1 : 0][b];
    uint32_t even[4] = {lower.x, upper.x, lower.y, upper.y};
    uint32_t odd[4] = {lower.z, upper.z, lower.w, upper.w};
    mmaAct<typename Traits::Act>(dot, even, key.x, key.y);
    mmaAct<typename Traits::Act>(second, odd, key.z, key.w);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) dot[e] += second[e];
}

// Value fragment for records record0 (k = c) and record1 (k = c + 4), rows g and g + 8; zero for records from `count`.
template <class Traits, class Value = typename Traits::Act>
__device__ __forceinline__ void valueFragment(float (&x)[4], const char* values, int record0, int record1, int count,
                                              int lane) {
  using A = Activation<Value>;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    int record = e < 2 ? record0 : record1;
    int offset = record * Traits::kValuePitch + ((lane / 4) + (e & 1) * 8) * 2;
    x[e] = record < count ? A::toFloat(*reinterpret_cast<const uint16_t*>(values + offset)) : 0.0f;
  }
}

// sum += x w for one tile of 8 records; w[tile][e] is the weight of record 2c + e for vector g of each tile.
template <class Traits>
__device__ __forceinline__ void addValues(float (&sum)[Traits::kTiles][4], const float (&x)[4],
                                          const float (&w)[Traits::kTiles][2]) {
  uint32_t a[4] = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
    Split w0 = splitTf32(w[tile][0]), w1 = splitTf32(w[tile][1]);
    mmaTf32(sum[tile], a, w0.high, w1.high);
    mmaTf32(sum[tile], a, w0.low, w1.low);
  }
}

// The same for records that are this step's tokens from `first` on, whose weights for tokens before them are zero. finite:
// all of the warp's values are.
template <class Traits>
__device__ __forceinline__ void addTokenValues(float (&sum)[Traits::kTiles][4], float (&x)[4],
                                               const float (&w)[Traits::kTiles][2], int first, bool finite, int lane) {
  if (!finite) {
    addNotFinite(sum, x, w, first, lane);
#pragma unroll
    for (float& value : x) value = isFinite(value) ? value : 0.0f;
  }
  addValues<Traits>(sum, x, w);
}

}  // namespace replayssm
