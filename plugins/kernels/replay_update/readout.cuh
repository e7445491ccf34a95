// Output-only evaluation of one warp's 16 state rows (paper, Eq. 6).
//
// Several tokens: tensor cores; the float32 state is split in two tf32 parts, so a product loses at most 2^-21 of its
// value, and activations are exact in tf32. One token: float32 FMA, a column in eight of a matrix instruction would be
// used. Lane (g, c) = (lane / 4, lane % 4) holds rows g and g + 8 and, of each block of 32 columns, columns 8c..8c+7.
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

// sum = S q for the warp's rows and one token, in float32. `query` holds the lane's columns, halves swapped on odd rows
// as loadColumns reads them, so nothing needs to be put in order. Columns of other tokens than 0 are zero.
template <class Traits>
__device__ __forceinline__ void readStateSingle(float (&sum)[1][4], const float* slab,
                                                const float (&query)[Traits::kBlocks][8], int lane) {
  const bool odd = (lane & 4) != 0;
  const float* row = slab + (lane / 4) * Traits::kStateDim + (lane % 4) * 8;
  float part[2][2] = {};
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* at = row + half * 8 * Traits::kStateDim + b * kBlock;
      float4 x = *reinterpret_cast<const float4*>(at + (odd ? 4 : 0));
      float4 y = *reinterpret_cast<const float4*>(at + (odd ? 0 : 4));
      const float* q = query[b];
      part[half][0] = fmaf(x.w, q[3], fmaf(x.z, q[2], fmaf(x.y, q[1], fmaf(x.x, q[0], part[half][0]))));
      part[half][1] = fmaf(y.w, q[7], fmaf(y.z, q[6], fmaf(y.y, q[5], fmaf(y.x, q[4], part[half][1]))));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = part[half][0] + part[half][1];
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    sum[0][2 * half] = total;
    sum[0][2 * half + 1] = 0.0f;
  }
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

// sum += x w for one tile of 8 records; w[tile][e] is the weight of record 2c + e for token g of each token tile.
template <class Traits>
__device__ __forceinline__ void addValues(float (&sum)[Traits::kTokenTiles][4], const float (&x)[4],
                                          const float (&w)[Traits::kTokenTiles][2]) {
  uint32_t a[4] = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
#pragma unroll
  for (int tile = 0; tile < Traits::kTokenTiles; ++tile) {
    Split w0 = splitTf32(w[tile][0]), w1 = splitTf32(w[tile][1]);
    mmaTf32(sum[tile], a, w0.high, w1.high);
    mmaTf32(sum[tile], a, w0.low, w1.low);
  }
}

// Per lane, for tokens g and g + 8.
struct TokenFactors {
  float decay[2];  // exp of the log-decay from the newest committed record to the token, 0 for tokens not given
};

// kTiles tiles of committed records from `first` on: weight dt exp(decay to the token) <k, q>.
template <class Traits, int kTiles>
__device__ __forceinline__ void addCommitted(float (&sum)[Traits::kTokenTiles][4], const char* keys, const char* values,
                                             const TokenVectors<Traits>& q, const Decay& decay,
                                             const TokenFactors& factors, int first, int pending, int lane) {
  float dot[kTiles][4], x[kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    int record = first + 8 * i + 2 * (lane % 4);
    keyDots<Traits>(dot[i], keys, first + 8 * i, pending, q, lane);
    valueFragment<Traits>(x[i], values, record, record + 1, pending, lane);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    float w[Traits::kTokenTiles][2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float weight = decay.committed(first + 8 * i, first + 8 * i + 2 * (lane % 4) + e);
#pragma unroll
      for (int tile = 0; tile < Traits::kTokenTiles; ++tile) {
        w[tile][e] = weight * factors.decay[tile] * dot[i][2 * tile + e];
      }
    }
    addValues<Traits>(sum, x[i], w);
  }
}

// This step's tokens as records, one tile from token `first` on: token i enters token t >= i with its decay in between,
// dt and <k, q>, and itself with the skip.
template <class Traits>
__device__ __forceinline__ void addDrafts(float (&sum)[Traits::kTokenTiles][4], const char* keys, const char* values,
                                          const TokenVectors<Traits>& q, const Decay& decay, float skip, int first,
                                          int pending, int tokens, int lane) {
  const int i0 = first + 2 * (lane % 4);
  float dot[4], x[4], w[Traits::kTokenTiles][2];
  keyDots<Traits>(dot, keys, pending + first, pending + tokens, q, lane);
  valueFragment<Traits>(x, values, pending + i0, pending + i0 + 1, pending + tokens, lane);
#pragma unroll
  for (int tile = 0; tile < Traits::kTokenTiles; ++tile) {
    int token = tile * 8 + lane / 4;
    float log[2];
    decay.between(log, i0, token, tokens);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float weight = __shfl_sync(kAllLanes, decay.draftWeight, i0 + e) * expf(log[e]) * dot[2 * tile + e];
      w[tile][e] = i0 + e <= token && token < tokens ? weight + (i0 + e == token ? skip : 0.0f) : 0.0f;
    }
  }
  addValues<Traits>(sum, x, w);
}

// The same for the only token of a plain step: no decay and no sum in between.
template <class Traits>
__device__ __forceinline__ void addToken(float (&sum)[1][4], const char* keys, const char* values,
                                         const TokenVectors<Traits>& q, float dt, float skip, int pending, int lane) {
  using A = Activation<typename Traits::Act>;
  float dot = 0.0f;
  const char* row = keys + pending * Traits::kKeyPitch + lane % 4 * 16;
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    uint4 key = *reinterpret_cast<const uint4*>(row + b * 64);
    const uint32_t k[4] = {key.x, key.y, key.z, key.w};
    const uint32_t v[4] = {q.part[0][b].x, q.part[0][b].y, q.part[0][b].z, q.part[0][b].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) dot = fmaf(A::high(k[i]), A::high(v[i]), fmaf(A::low(k[i]), A::low(v[i]), dot));
  }
  dot += __shfl_xor_sync(kAllLanes, dot, 1);
  dot += __shfl_xor_sync(kAllLanes, dot, 2);
  dot = __shfl_sync(kAllLanes, dot, 0);  // only the lanes of token 0 hold its query
  float weight = fmaf(dt, dot, skip);
  const char* value = values + pending * Traits::kValuePitch + lane / 4 * 2;
  sum[0][0] = fmaf(weight, A::toFloat(*reinterpret_cast<const uint16_t*>(value)), sum[0][0]);
  sum[0][2] = fmaf(weight, A::toFloat(*reinterpret_cast<const uint16_t*>(value + 16)), sum[0][2]);
}

// sum += the records' part of the outputs: committed records, then this step's tokens.
template <class Traits>
__device__ __forceinline__ void readRecords(float (&sum)[Traits::kTokenTiles][4], const char* keys, const char* values,
                                            const TokenVectors<Traits>& q, const Decay& decay, float skip, int pending,
                                            int tokens, int lane) {
  TokenFactors factors;
#pragma unroll
  for (int tile = 0; tile < Traits::kTokenTiles; ++tile) {
    int token = tile * 8 + lane / 4;
    float prefix = __shfl_sync(kAllLanes, decay.prefix, token);
    factors.decay[tile] = token < tokens ? expf(prefix) : 0.0f;
  }
  if constexpr (Traits::kSingle) {
    addToken<Traits>(sum, keys, values, q, __shfl_sync(kAllLanes, decay.draftWeight, 0), skip, pending, lane);
  } else {
    for (int first = 0; first < tokens; first += 8) {
      addDrafts<Traits>(sum, keys, values, q, decay, skip, first, pending, tokens, lane);
    }
  }
  int first = 0;
  for (; pending - first > 8; first += 16) {
    addCommitted<Traits, 2>(sum, keys, values, q, decay, factors, first, pending, lane);
  }
  if (first < pending) addCommitted<Traits, 1>(sum, keys, values, q, decay, factors, first, pending, lane);
}

}  // namespace replayssm
