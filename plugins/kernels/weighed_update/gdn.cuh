// What a consumer warp does with a gated-delta-rule item (paper, Eq. 9-11): outputs, corrections, flush.
//
// With the vectors of gdn_weights.cuh, lane (g, c) = (lane / 4, lane % 4) accumulates, for rows g and g + 8 and token
// t = 4 tile + c, what the state and the committed records recall for the key (elements 0 and 2 of a tile's sum) and
// contribute to the output (1 and 3). The unit triangular system over the step's tokens is then solved token by token; a
// correction is rounded to float16 before anything uses it.
#pragma once

#include <type_traits>

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
  static constexpr bool kPlain = Traits::kMaxTokens == 1;
  std::conditional_t<kPlain, PlainVectors<Traits>, Vectors<Traits>> vectors{};

  // The lane once more, so that the compiler derives its indices anew for each item and not keeps them in registers.
  __device__ void refreshLane() { asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)); }

  // The step's keys and queries, once a chunk.
  __device__ void loadVectors(const ItemHeader& item, const char* keys) {
    const char* own = keys + item.pending() * Traits::kKeyPitch;
    if constexpr (kPlain) {
      vectors.load(own, keys + layout.queryOffset, lane);
    } else {
      vectors.load(own, keys + layout.queryOffset, item.tokens(), lane);
    }
  }

  __device__ void readItemState(float (&sum)[Traits::kTiles][4], const char* stage) const {
    const float* slab = reinterpret_cast<const float*>(stage) + warp * kSlab * Traits::kStateDim;
    if constexpr (kPlain) {
      vectors.read(sum, slab, lane);
    } else {
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

  // Corrections in order of the tokens, each rounded before it is added to what follows, then all into the ring. Lane
  // (g, c) makes those of its own token of each tile.
  __device__ void solve(float (&sum)[Traits::kTiles][4], const WeightRows<Traits>& rows, const char* values,
                        const float* beta, const ItemHeader& item) const {
    using A = Activation<Act>;
    const int pending = item.pending(), tokens = item.tokens();
    const float* coupling = rows.token(pending, 0) + 2 * (lane % 4);
    __half* ring = static_cast<__half*>(p.ringValue) + item.slot * p.ringValueSlotStride +
                   static_cast<int64_t>(item.head()) * p.ringRows * Traits::kHeadDim + this->headRow(item) + lane / 4;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      if (4 * tile >= tokens) break;
      const int own = 4 * tile + lane % 4, last = min(own, tokens - 1);
      const char* value = values + (pending + last) * Traits::kValuePitch + lane / 4 * 2;
      const float v[2] = {A::toFloat(*reinterpret_cast<const uint16_t*>(value)),
                          A::toFloat(*reinterpret_cast<const uint16_t*>(value + 16))};
      const float rate = beta[last];
      __half rounded[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * tile + i >= Traits::kMaxTokens || 4 * tile + i >= tokens) break;
        float u[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float exact = rate * (v[half] - sum[tile][2 * half]);
          const __half own16 = __float2half_rn(fminf(fmaxf(exact, -kLargestHalf), kLargestHalf));
          if (lane % 4 == i) rounded[half] = own16;
          u[half] = __shfl_sync(kAllLanes, __half2float(own16), (lane & ~3) | i);
        }
#pragma unroll
        for (int later = tile; later < Traits::kTiles; ++later) {
          const float2 weight =
              *reinterpret_cast<const float2*>(coupling + (4 * tile + i) * Traits::kWeightPitch + 8 * later);
          sum[later][0] = fmaf(weight.x, u[0], sum[later][0]);
          sum[later][1] = fmaf(weight.y, u[0], sum[later][1]);
          sum[later][2] = fmaf(weight.x, u[1], sum[later][2]);
          sum[later][3] = fmaf(weight.y, u[1], sum[later][3]);
        }
      }
      if (own < tokens) {
        __half* at = ring + static_cast<int64_t>(this->ringRow(item, own)) * Traits::kHeadDim;
        at[0] = rounded[0];
        at[8] = rounded[1];
      }
    }
  }

  // The rest, with the head's weights in place. `sum` holds the state times the raw vectors.
  __device__ void finishItem(float (&sum)[Traits::kTiles][4], const ItemHeader& item, char* stage, char* slot,
                             const char* keys) {
    const WeightRows<Traits> rows{reinterpret_cast<float*>(slot + layout.weightOffset)};
    float* slab = reinterpret_cast<float*>(stage) + warp * kSlab * Traits::kStateDim;
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
    if (pending + item.tokens() > p.window) {
      Decay decay;
      decay.loadGdn(reinterpret_cast<const float*>(slot + layout.dtOffset),
                    reinterpret_cast<const float*>(keys + layout.factorOffset), pending, item.tokens(), lane);
      this->template flush<__half>(item, slab, keys, values, decay);
    }
  }
};

}  // namespace replayssm::weighed
