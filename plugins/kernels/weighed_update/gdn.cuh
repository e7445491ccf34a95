// What a consumer warp does with a gated-delta-rule item (paper, Eq. 9-11): outputs, corrections, flush.
//
// With the vectors of gdn_weights.cuh, lane (g, c) = (lane / 4, lane % 4) accumulates, for rows g and g + 8 and token
// t = 4 tile + c, what the state and the committed records recall for the key (elements 0 and 2 of a tile's sum) and
// contribute to the output (1 and 3). The unit triangular system over the step's tokens is then solved tile by tile; a
// correction is rounded to float16, which tf32 holds exactly, before anything uses it.
#pragma once

#include "../common/store_again.cuh"
#include "../common/vector.cuh"
#include "gdn_readout.cuh"
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
  __device__ void refreshLane() {
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    __builtin_assume(lane >= 0 && lane < 32);
  }

  // sum = the warp's rows of the state, at `slab`, times the step's keys and queries; so many blocks at a time.
  template <int kUnroll>
  __device__ void readItemState(float (&sum)[Traits::kTiles][4], const ItemHeader& item, const float* slab,
                                const char* keys) const {
    const char* own = keys + item.pending() * Traits::kKeyPitch;
    if constexpr (Traits::kMaxTokens == 1) {
      multiplyByPair<Traits, kUnroll>(sum, slab, own, keys + layout.queryOffset, lane);
    } else {
      multiplyState<Traits, kUnroll>(sum, slab, own, keys + layout.queryOffset, item.tokens(), lane);
    }
  }

  __device__ void writeZeros(const ItemHeader& item) const {
#pragma unroll 1
    for (int tile = 0; tile < Traits::kTiles; ++tile) writeOutput(item, outputOf<Traits>(p, item), tile, 0.0f, 0.0f);
  }

  // Numbers of rows g and g + 8 become those of two rows side by side, of which pairRow is the first one: a token's 16 rows are
  // a sector of memory, which one store writes.
  __device__ uint32_t pairRows(uint32_t numbers) const {
    return __byte_perm(numbers, __shfl_xor_sync(kAllLanes, numbers, 4), (lane & 4) != 0 ? 0x3276 : 0x5410);
  }
  __device__ int pairRow() const { return lane / 8 * 2 + (lane & 4) * 2; }

  // Of a tile's token, for rows g and g + 8. `target`: of the head's first token and row.
  __device__ void writeOutput(const ItemHeader& item, void* target, int tile, float lower, float upper) const {
    const int token = tile * 4 + lane % 4;
    const uint32_t rows = pairRows(packPair<Act>(lower, upper));
    if (token >= p.tokens) return;
    Act* out = static_cast<Act*>(target) + this->headRow(item) + pairRow() + token * p.outTokenStride;
    storeAgain(out, token < item.tokens() ? rows : 0u);
  }

  // Corrections in order of the tokens, each rounded before it is added to what follows, then all into the ring; outputs. A
  // tile's four tokens are solved by every lane for its two rows; what they add to all later vectors is a product of
  // matrices. A loop over the tiles, whose sums move up: see gdn_readout.cuh.
  __device__ void solve(float (&sum)[Traits::kTiles][4], const WeightRows<Traits>& rows, const char* values,
                        const float* beta, const ItemHeader& item, const HeadTargets& targets) const {
    const int pending = item.pending(), tokens = item.tokens();
    __half* const ring = static_cast<__half*>(targets.ring) + this->headRow(item) + pairRow();
#pragma unroll 1
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      if (4 * tile < tokens) {
        const int own = 4 * tile + lane % 4;
        const __half2 u = solveTile(sum[0], tile, rows, values, beta, pending, tokens);
        const uint32_t rowsOfU = pairRows(*reinterpret_cast<const uint32_t*>(&u));
        if (own < tokens) {
          *reinterpret_cast<uint32_t*>(ring + this->ringRow(item, own) * Traits::kHeadDim) = rowsOfU;
        }
        addCorrections(sum, tile, rows, u, pending);
      }
      writeOutput(item, targets.out, tile, sum[0][1], sum[0][3]);
#pragma unroll
      for (int next = 1; next < Traits::kTiles; ++next) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[next - 1][e] = sum[next][e];
      }
    }
  }

  // The lane's own correction of a tile, zero where it has no token. What is read of tokens that there are not is of no
  // consequence: corrections matter to later tokens only.
  __device__ __half2 solveTile(const float (&sum)[4], int tile, const WeightRows<Traits>& rows, const char* values,
                               const float* beta, int pending, int tokens) const {
    using A = Activation<Act>;
    constexpr int kTokens = Traits::kMaxTokens < 4 ? Traits::kMaxTokens : 4;
    const int own = 4 * tile + lane % 4;
    const char* value = values + (pending + min(own, tokens - 1)) * Traits::kValuePitch + lane / 4 * 2;
    const float missing[2] = {A::toFloat(*reinterpret_cast<const uint16_t*>(value)) - sum[0],
                              A::toFloat(*reinterpret_cast<const uint16_t*>(value + 16)) - sum[2]};
    const float* weights = rows.token(pending, 4 * tile) + 8 * tile;
    float rest[kTokens][2], rates[4];
    *reinterpret_cast<float4*>(rates) = *reinterpret_cast<const float4*>(beta + 4 * tile);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) rest[i][half] = __shfl_sync(kAllLanes, missing[half], i, 4);
    }
    __half2 mine = __float2half2_rn(0.0f);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const __half2 u = roundedCorrections(rates[i] * rest[i][0], rates[i] * rest[i][1]);
      if (lane % 4 == i) mine = u;
      const float2 exact = __half22float2(u);
#pragma unroll
      for (int later = i + 1; later < kTokens; ++later) {
        const float weight = weights[i * Traits::kWeightPitch + 2 * later];
        rest[later][0] = fmaf(-weight, exact.x, rest[later][0]);
        rest[later][1] = fmaf(-weight, exact.y, rest[later][1]);
      }
    }
    return own < tokens ? mine : __float2half2_rn(0.0f);
  }

  // sum += corrections of rows g and g + 8 (exact in tf32) times what they weigh for vector g, in two tf32 parts.
  static __device__ __forceinline__ void multiplyCorrections(float (&sum)[4], float lower, float upper, float weight) {
    const Split w = splitTf32(weight);
    const uint32_t x = __float_as_uint(lower), y = __float_as_uint(upper);
    mmaTf32(sum, {x, y, x, y}, w.high, w.low);
  }

  // What a tile's corrections add to its queries and to later tiles, whose sums follow its own.
  __device__ void addCorrections(float (&sum)[Traits::kTiles][4], int tile, const WeightRows<Traits>& rows, __half2 u,
                                 int pending) const {
    const float2 exact = __half22float2(u);
    if constexpr (Traits::kMaxTokens == 1) {
      const float weight = rows.token(pending, 0)[1];
      sum[0][1] = fmaf(weight, exact.x, sum[0][1]);
      sum[0][3] = fmaf(weight, exact.y, sum[0][3]);
    } else {
      const float* weights = rows.token(pending, 4 * tile + lane % 4) + 8 * tile + lane / 4;
      // Of the tile's own vectors some precede a correction, with weight zero: NaN stays out of their product, and reaches the
      // queries that it belongs to below. A correction behind NaN is NaN.
      const float own[2] = {fmaxf(exact.x, -kLargestHalf), fmaxf(exact.y, -kLargestHalf)};
      multiplyCorrections(sum[0], own[0], own[1], weights[0]);
#pragma unroll
      for (int later = 1; later < Traits::kTiles; ++later) {
        if (tile + later < Traits::kTiles) multiplyCorrections(sum[later], exact.x, exact.y, weights[8 * later]);
      }
      sum[0][1] = fmaf(0.0f, exact.x, sum[0][1]);
      sum[0][3] = fmaf(0.0f, exact.y, sum[0][3]);
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
#pragma unroll 1
    for (int first = 0; first < pending; first += 8) {
      addWeighed<Traits, __half>(sum, rows.record(0), values, first, pending, lane);
    }
    const HeadTargets targets = *reinterpret_cast<const HeadTargets*>(slot + layout.targetOffset);
    solve(sum, rows, values, beta, item, targets);
  }
};

}  // namespace replayssm::weighed
