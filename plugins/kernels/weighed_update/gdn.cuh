// What a consumer warp does with a gated-delta-rule item (paper, Eq. 9-11): outputs, corrections, flush.
//
// With the vectors of gdn_weights.cuh, lane (g, c) = (lane / 4, lane % 4) accumulates, for rows g and g + 8 and token
// t = 4 tile + c, what the state and the committed records recall for the key (elements 0 and 2 of a tile's sum) and
// contribute to the output (1 and 3). The unit triangular system over the step's tokens is then solved tile by tile; a
// correction is rounded to float16, which tf32 holds exactly, before anything uses it.
#pragma once

#include "gdn_single.cuh"
#include "gdn_weights.cuh"

namespace replayssm::weighed {

template <class Traits>
struct GdnConsumer : ConsumerBase<Traits> {
  using Act = typename Traits::Act;
  using ConsumerBase<Traits>::p;
  using ConsumerBase<Traits>::layout;
  using ConsumerBase<Traits>::warp;
  using ConsumerBase<Traits>::lane;

  // The lane once more, so that the compiler derives its indices anew for each item and not keeps them in registers.
  __device__ void refreshLane() { asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)); }

  // sum = the warp's rows of the state, at `slab`, times the step's keys and queries.
  __device__ void readItemState(float (&sum)[Traits::kTiles][4], const ItemHeader& item, const float* slab,
                                const char* keys) const {
    const char* own = keys + item.pending() * Traits::kKeyPitch;
    if constexpr (Traits::kMaxTokens == 1) {
      PlainVectors<Traits> vectors;
      vectors.load(own, keys + layout.queryOffset, lane);
      vectors.read(sum, slab, lane);
    } else {
      Vectors<Traits> vectors;
      vectors.template load<false>(own, keys + layout.queryOffset, item.tokens(), lane);
      readState<Traits>(sum, slab, vectors, lane);
    }
  }

  __device__ void writeZeros(const ItemHeader& item) const {
    float zero[Traits::kTiles][4] = {};
    writeOutput(item, zero);
  }

  __device__ void writeOutput(const ItemHeader& item, const float (&sum)[Traits::kTiles][4]) const {
    Act* out = static_cast<Act*>(p.out) + item.row * p.outRowStride + item.head() * p.outHeadStride +
               this->headRow(item) + lane / 4;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      int token = tile * 4 + lane % 4;
      if (token >= p.tokens) continue;
      bool real = token < item.tokens();
      uint16_t* at = reinterpret_cast<uint16_t*>(out + token * p.outTokenStride);
      at[0] = Activation<Act>::fromFloat(real ? sum[tile][1] : 0.0f);
      at[8] = Activation<Act>::fromFloat(real ? sum[tile][3] : 0.0f);
    }
  }

  // beta (v - what is recalled) of rows g and g + 8, as the ring holds it: saturated and rounded to float16.
  static __device__ __half2 rounded(float beta, float lower, float upper) {
    const __half2 largest = __float2half2_rn(kLargestHalf);
    return __hmin2(__hmax2(__floats2half2_rn(beta * lower, beta * upper), __hneg2(largest)), largest);
  }

  // Corrections in order of the tokens, each rounded before it is added to what follows, then all into the ring. A tile's
  // four tokens are solved by every lane for its two rows; what they add to all later vectors is a product of matrices.
  __device__ void solve(float (&sum)[Traits::kTiles][4], const WeightRows<Traits>& rows, const char* values,
                        const float* beta, const ItemHeader& item) const {
    const int pending = item.pending(), tokens = item.tokens();
    __half* ring = static_cast<__half*>(p.ringValue) + item.slot * p.ringValueSlotStride +
                   static_cast<int64_t>(item.head()) * p.ringRows * Traits::kHeadDim + this->headRow(item) + lane / 4;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      if (4 * tile >= tokens) break;
      const int own = 4 * tile + lane % 4;
      const __half2 u = solveTile(sum[tile], tile, rows, values, beta, pending, tokens);
      if (own < tokens) {
        __half* at = ring + static_cast<int64_t>(this->ringRow(item, own)) * Traits::kHeadDim;
        at[0] = __low2half(u);
        at[8] = __high2half(u);
      }
      addCorrections(sum, tile, rows, u, pending, tokens);
    }
  }

  // The lane's own correction of a tile, zero where it has no token.
  __device__ __half2 solveTile(const float (&sum)[4], int tile, const WeightRows<Traits>& rows, const char* values,
                               const float* beta, int pending, int tokens) const {
    using A = Activation<Act>;
    constexpr int kTokens = Traits::kMaxTokens < 4 ? Traits::kMaxTokens : 4;
    const int first = 4 * tile, last = min(first + lane % 4, tokens - 1);
    const char* value = values + (pending + last) * Traits::kValuePitch + lane / 4 * 2;
    const float missing[2] = {A::toFloat(*reinterpret_cast<const uint16_t*>(value)) - sum[0],
                              A::toFloat(*reinterpret_cast<const uint16_t*>(value + 16)) - sum[2]};
    float rest[kTokens][2], rate[kTokens], weight[kTokens][kTokens];  // what is read repeats the last token's
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int row = min(first + i, tokens - 1);
      rate[i] = beta[row];
#pragma unroll
      for (int later = i + 1; later < kTokens; ++later) {
        weight[i][later] = rows.token(pending, row)[8 * tile + 2 * later];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) rest[i][half] = __shfl_sync(kAllLanes, missing[half], (lane & ~3) | i);
    }
    __half2 mine = __float2half2_rn(0.0f);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const __half2 u = rounded(rate[i], rest[i][0], rest[i][1]);
      if (lane % 4 == i && first + i < tokens) mine = u;
      const float2 exact = __half22float2(u);
#pragma unroll
      for (int later = i + 1; later < kTokens; ++later) {
        rest[later][0] = fmaf(-weight[i][later], exact.x, rest[later][0]);
        rest[later][1] = fmaf(-weight[i][later], exact.y, rest[later][1]);
      }
    }
    return mine;
  }

  // What a tile's corrections add to its queries and to later tiles.
  __device__ void addCorrections(float (&sum)[Traits::kTiles][4], int tile, const WeightRows<Traits>& rows, __half2 u,
                                 int pending, int tokens) const {
    const float2 exact = __half22float2(u);
    if constexpr (Traits::kMaxTokens == 1) {
      const float weight = rows.token(pending, 0)[1];
      sum[0][1] = fmaf(weight, exact.x, sum[0][1]);
      sum[0][3] = fmaf(weight, exact.y, sum[0][3]);
    } else {
      const float* weights = rows.token(pending, min(4 * tile + lane % 4, tokens - 1)) + lane / 4;
      const uint32_t a[4] = {__float_as_uint(exact.x), __float_as_uint(exact.y), 0u, 0u};
#pragma unroll
      for (int later = tile; later < Traits::kTiles; ++later) {
        const Split w = splitTf32(weights[8 * later]);
        mmaTf32(sum[later], a, w.high, 0u);
        mmaTf32(sum[later], a, w.low, 0u);
      }
    }
  }

  __device__ bool flushes(const ItemHeader& item) const { return item.pending() + item.tokens() > p.window; }

  // Folds the committed records into the warp's rows, at `slab`, and stores them.
  __device__ void flushItem(const ItemHeader& item, float* slab, const char* slot, const char* keys) const {
    Decay decay;
    decay.loadGdn(reinterpret_cast<const float*>(slot + layout.dtOffset),
                  reinterpret_cast<const float*>(keys + layout.factorOffset), item.pending(), item.tokens(), lane);
    this->template flush<__half>(item, slab, keys, slot + this->headRow(item) * 2, decay);
  }

  // Outputs and corrections, with the head's weights in place. `sum` holds the state times the raw vectors.
  __device__ void finishItem(float (&sum)[Traits::kTiles][4], const ItemHeader& item, const char* slot) const {
    const WeightRows<Traits> rows{reinterpret_cast<float*>(const_cast<char*>(slot) + layout.weightOffset)};
    const char* values = slot + this->headRow(item) * 2;
    const float* beta = reinterpret_cast<const float*>(slot + layout.scalarOffset);
    const int pending = item.pending();
    scaleSums<Traits>(sum, rows, lane);
#pragma unroll 2
    for (int first = 0; first < pending; first += 8) {
      addWeighed<Traits, __half>(sum, rows.record(0), values, first, pending, lane);
    }
    solve(sum, rows, values, beta, item);
    writeOutput(item, sum);
  }
};

}  // namespace replayssm::weighed
