// Committed records and this step's tokens as columns of one matrix product: 16 records a tile, weights split into
// three 16-bit parts, which together hold the float32 weight.
#pragma once

#include "../common/activation.cuh"
#include "../common/mma.cuh"
#include "../replay_update/decay.cuh"
#include "../replay_update/not_finite.cuh"
#include "traits.cuh"

namespace replayssm {

// d[i] of an 8 x 8 matrix of 16-bit numbers each, transposed; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void loadTransposed(uint32_t (&d)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}

// Pairs of float32 numbers as three 16-bit parts each.
template <class Act, int kPairs>
struct WeightParts;

// bfloat16 has float32's range: the parts are the number, the rest, and the rest's rest.
template <int kPairs>
struct WeightParts<__nv_bfloat16, kPairs> {
  uint32_t part[3][kPairs];
  static constexpr bool kScaled = false;
  __device__ __forceinline__ float set(const float (&weight)[2 * kPairs]) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float x = weight[2 * pair], y = weight[2 * pair + 1];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
        part[i][pair] = *reinterpret_cast<const uint32_t*>(&both);
        x -= __uint_as_float(part[i][pair] << 16);
        y -= __uint_as_float(part[i][pair] & 0xffff0000u);
      }
    }
    return 1.0f;
  }
};

// float16 has not: the warp's weights are scaled to its range first. Returns what the product is multiplied by.
template <int kPairs>
struct WeightParts<__half, kPairs> {
  uint32_t part[3][kPairs];
  static constexpr bool kScaled = true;
  __device__ __forceinline__ float set(const float (&weight)[2 * kPairs]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) largest = fmaxf(largest, fabsf(weight[i]));
    return set<16>(weight, largest);
  }
  // The same for runs of 2 kHalfLanes lanes on their own; largest: of the lane's weights.
  template <int kHalfLanes>
  __device__ __forceinline__ float set(const float (&weight)[2 * kPairs], float largest) {
#pragma unroll
    for (int d = kHalfLanes; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, d));
    const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -100);
    const float up = __uint_as_float(static_cast<uint32_t>(127 + 14 - exponent) << 23);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float x = weight[2 * pair] * up, y = weight[2 * pair + 1] * up;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const __half2 both = __floats2half2_rn(x, y);
        part[i][pair] = *reinterpret_cast<const uint32_t*>(&both);
        const float2 back = __half22float2(both);
        x -= back.x;
        y -= back.y;
      }
    }
    return __uint_as_float(static_cast<uint32_t>(127 - 14 + exponent) << 23);
  }
};

// One head's decay, as token g of lane (g, c) needs it.
struct HeadWeights {
  Decay decay;
  float skip;        // set by the caller
  float tokenDecay;  // exp of the log-decay from the newest committed record to token g

  __device__ void load(const float* dt, float a, int pending, int tokens, int lane) {
    decay.loadMamba2(dt, a, pending, tokens, lane);
    tokenDecay = expf(__shfl_sync(kAllLanes, decay.prefix, lane / 4));
  }
};

// Weights of records first + {2c, 2c + 1, 2c + 8, 2c + 9} for token g; dot: their products with its query. `first` is
// a multiple of 16 or, for the tokens alone, `pending`. Zero where the record does not reach the token.
template <class Traits, bool kTokensOnly>
__device__ __forceinline__ void recordWeights(float (&weight)[4], const float4& dot, const HeadWeights& head, int first,
                                              int pending, int tokens, int lane) {
  const float dots[4] = {dot.x, dot.y, dot.z, dot.w};
  const int token = lane / 4;
  const int base = first + 2 * (lane % 4) - pending;
  float log[2][2];
  head.decay.between(log[0], base, token, tokens);
  head.decay.between(log[1], base + 8, token, tokens);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int record = first + 2 * (lane % 4) + e % 2 + e / 2 * 8;
    const int source = record - pending;  // token of this step
    float committed = 0.0f;
    if constexpr (!kTokensOnly) committed = head.decay.committed(first, record) * head.tokenDecay;
    const float draft = __shfl_sync(kAllLanes, head.decay.draftWeight, source & 31) * expf(log[e / 2][e % 2]);
    const float factor = source < 0 ? committed : draft;
    const bool reaches = token < tokens && source <= token;
    weight[e] = reaches ? fmaf(factor, dots[e], source == token ? head.skip : 0.0f) : 0.0f;
  }
}

// Takes what is not finite out of a fragment of values and adds it to one slab's sums. `first`: the fragment's first record as
// a token of this step.
template <class Value>
__device__ __forceinline__ void takeNotFinite(float (&sum)[4], uint32_t (&x)[4], const float (&weight)[4], int first,
                                              int lane) {
  using A = Activation<Value>;
  if (allFinite<Value>(x)) return;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    uint32_t &lower = x[2 * tile], &upper = x[2 * tile + 1];
    const float own[4] = {A::low(lower), A::low(upper), A::high(lower), A::high(upper)};
    const float w[1][2] = {{weight[2 * tile], weight[2 * tile + 1]}};
    float tileSum[1][4] = {{sum[0], sum[1], sum[2], sum[3]}};
    addNotFinite(tileSum, own, w, first + 8 * tile, lane);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = tileSum[0][e];
    lower &= (isFinite(own[0]) ? 0xffffu : 0u) | (isFinite(own[2]) ? 0xffff0000u : 0u);
    upper &= (isFinite(own[1]) ? 0xffffu : 0u) | (isFinite(own[3]) ? 0xffff0000u : 0u);
  }
}

// sum[m] += records x weights for the 16 rows of slab m; Value: what the records' values are. `values`: shared address
// of record `first`'s value in the first slab; `count` records from there on are in place, the others repeat the last
// one with weight zero. kTokens: several tokens of this step may be among them; `firstToken`: the first record as one, negative
// for committed records.
template <class Value, int kSlabs, int kPitch, bool kTokens = false>
__device__ __forceinline__ void addRecords(float (&sum)[kSlabs][4], uint32_t values, const float (&weight)[4],
                                           int count, int lane, int firstToken = 0) {
  WeightParts<Value, 2> parts;
  const float factor = parts.set(weight);
  const int record = min(lane % 8 + lane / 16 * 8, count - 1);
  const uint32_t row = values + record * kPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int m = 0; m < kSlabs; ++m) {
    uint32_t x[4];
    loadTransposed(x, row + 32 * m);
    if constexpr (kTokens) {
      if (firstToken > -16) takeNotFinite<Value>(sum[m], x, weight, firstToken, lane);  // else committed records alone
    }
    if constexpr (WeightParts<Value, 2>::kScaled) {
      float part[4] = {};
#pragma unroll
      for (int i = 0; i < 3; ++i) mmaAct<Value>(part, x, parts.part[i][0], parts.part[i][1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[m][e] = fmaf(factor, part[e], sum[m][e]);
    } else {
#pragma unroll
      for (int i = 0; i < 3; ++i) mmaAct<Value>(sum[m], x, parts.part[i][0], parts.part[i][1]);
    }
  }
}

}  // namespace replayssm
