// Output-only evaluation of one warp's 16 state rows (paper, Eq. 6), on tensor cores.
//
// The float32 state is split in two tf32 parts, so a product loses at most 2^-21 of its value; activations are exact in
// tf32. Lane (g, c) = (lane / 4, lane % 4) holds rows g and g + 8 and, of each block of 32 columns, columns 8c..8c+7.
#pragma once

#include "../common/activation.cuh"
#include "../common/mma.cuh"
#include "decay.cuh"
#include "traits.cuh"

namespace replayssm {

// Vectors of up to 16 tokens over N elements: lane (g, c) holds elements 8c..8c+7 of every block for tokens g and g + 8.
template <class Traits>
struct TokenVectors {
  uint4 part[Traits::kTokenTiles][Traits::kBlocks];

  __device__ void load(const char* rows, int tokens, int lane) {
#pragma unroll
    for (int tile = 0; tile < Traits::kTokenTiles; ++tile) {
      int token = tile * 8 + lane / 4;
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
  *reinterpret_cast<float4*>(&s[0]) = odd ? y : x;
  *reinterpret_cast<float4*>(&s[4]) = odd ? x : y;
}

__device__ __forceinline__ void storeColumns(float* at, const float (&s)[8], int lane) {
  const bool odd = (lane & 4) != 0;
  const float4 low = *reinterpret_cast<const float4*>(&s[0]), high = *reinterpret_cast<const float4*>(&s[4]);
  *reinterpret_cast<float4*>(at + (odd ? 4 : 0)) = odd ? high : low;
  *reinterpret_cast<float4*>(at + (odd ? 0 : 4)) = odd ? low : high;
}

// sum = S q for the warp's rows; `slab` points at its first row in shared memory.
template <class Traits>
__device__ __forceinline__ void readState(float (&sum)[Traits::kTokenTiles][4], const float* slab,
                                          const TokenVectors<Traits>& q, int lane) {
  using A = Activation<typename Traits::Act>;
  float part[Traits::kTokenTiles][4][4] = {};
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
        Split split = splitTf32(s[e & 1][i + (e & 2) * 2]);
        high[e] = split.high;
        low[e] = split.low;
      }
#pragma unroll
      for (int tile = 0; tile < Traits::kTokenTiles; ++tile) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(&q.part[tile][b]);
        float b0 = i & 1 ? A::high(words[i / 2]) : A::low(words[i / 2]);
        float b1 = i & 1 ? A::high(words[2 + i / 2]) : A::low(words[2 + i / 2]);
        mmaTf32(part[tile][i & 1], high, __float_as_uint(b0), __float_as_uint(b1));
        mmaTf32(part[tile][2 + (i & 1)], low, __float_as_uint(b0), __float_as_uint(b1));
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < Traits::kTokenTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum[tile][e] = (part[tile][0][e] + part[tile][1][e]) + (part[tile][2][e] + part[tile][3][e]);
    }
  }
}

// dot[e] = <q of token, k of record> for tokens g, g, g + 8, g + 8 and records first + 2c, first + 2c + 1, twice.
// Records from `count` on repeat the last one; the caller masks them.
template <class Traits>
__device__ __forceinline__ void keyDots(float (&dot)[4], const char* keys, int first, int count,
                                        const TokenVectors<Traits>& q, int lane) {
  const char* row = keys + min(first + lane / 4, count - 1) * Traits::kKeyPitch + (lane % 4) * 16;
  float second[4] = {};
#pragma unroll
  for (int e = 0; e < 4; ++e) dot[e] = 0.0f;
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    uint4 key = *reinterpret_cast<const uint4*>(row + b * 64);
    uint4 lower = q.part[0][b];
    uint4 upper = make_uint4(0, 0, 0, 0);
    if constexpr (Traits::kTokenTiles == 2) upper = q.part[1][b];
    uint32_t even[4] = {lower.x, upper.x, lower.y, upper.y};
    uint32_t odd[4] = {lower.z, upper.z, lower.w, upper.w};
    mmaAct<typename Traits::Act>(dot, even, key.x, key.y);
    mmaAct<typename Traits::Act>(second, odd, key.z, key.w);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) dot[e] += second[e];
}

// Value fragment for records record0 (k = c) and record1 (k = c + 4), rows g and g + 8; zero for records from `count`.
template <class Traits>
__device__ __forceinline__ void valueFragment(float (&x)[4], const char* values, int record0, int record1, int count,
                                              int lane) {
  using A = Activation<typename Traits::Act>;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    int record = e < 2 ? record0 : record1;
    int offset = record * Traits::kValuePitch + ((lane / 4) + (e & 1) * 8) * 2;
    x[e] = record < count ? A::toFloat(*reinterpret_cast<const uint16_t*>(values + offset)) : 0.0f;
  }
}

// How much of record j's value token's output takes: decay from the record to the token, times dt, times <k, q>; for
// the token itself also the skip. Zero where the record is none of the token's past. All lanes call it.
__device__ __forceinline__ float recordWeight(const Decay& decay, float dot, int first, int j, int token, float prefix,
                                              float skip, int pending, int tokens) {
  float suffix, weight;
  decay.committed(first, j, pending, suffix, weight);
  float factor = weight * expf(suffix + prefix);
  bool real = j < pending;
  float extra = 0.0f;
  if (first + 8 > pending) {  // the tile holds tokens of this step
    int draft = j - pending;
    float log = tokens > 1 ? decay.between(draft, token, tokens) : 0.0f;
    float draftWeight = __shfl_sync(kAllLanes, decay.draftWeight, draft & 31);
    if (draft >= 0 && draft <= token) {
      real = true;
      factor = draftWeight * expf(log);
      if (draft == token) extra = skip;
    }
  }
  return real && token < tokens ? factor * dot + extra : 0.0f;
}

// sum += the records' part: x (dt exp(decay) <k, q>) over committed records and this step's tokens. Records go in
// pairs of tiles, whose chains of dependent instructions overlap.
template <class Traits>
__device__ __forceinline__ void readRecords(float (&sum)[Traits::kTokenTiles][4], const char* keys, const char* values,
                                            const TokenVectors<Traits>& q, const Decay& decay, float skip, int pending,
                                            int tokens, int lane) {
  const int total = pending + tokens;
  const int column = 2 * (lane % 4);
  float prefix[2];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) prefix[tile] = __shfl_sync(kAllLanes, decay.prefix, tile * 8 + lane / 4);
  for (int base = 0; base < total; base += 16) {
    float dot[2][4], x[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int first = base + 8 * half;
      keyDots<Traits>(dot[half], keys, first, total, q, lane);
      valueFragment<Traits>(x[half], values, first + column, first + column + 1, total, lane);
    }
#pragma unroll
    for (int tile = 0; tile < Traits::kTokenTiles; ++tile) {
      int token = tile * 8 + lane / 4;
      float low[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int first = base + 8 * half;
        Split w[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          w[e] = splitTf32(recordWeight(decay, dot[half][2 * tile + e], first, first + column + e, token,
                                        prefix[tile], skip, pending, tokens));
        }
        uint32_t a[4] = {__float_as_uint(x[half][0]), __float_as_uint(x[half][1]), __float_as_uint(x[half][2]),
                         __float_as_uint(x[half][3])};
        mmaTf32(sum[tile], a, w[0].high, w[1].high);
        mmaTf32(low, a, w[0].low, w[1].low);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[tile][e] += low[e];
    }
  }
}

}  // namespace replayssm
