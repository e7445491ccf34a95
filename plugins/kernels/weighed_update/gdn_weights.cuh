// The weights of a gated-delta-rule head (paper, Eq. 9-11), see weights.cuh. Vector 2t of a step is token t's key, vector
// 2t + 1 its query. Products of keys and queries are a group's: they are made once a chunk, each head adds its decays.
#pragma once

#include "../common/gdn.cuh"
#include "weights.cuh"

namespace replayssm::weighed {

template <class Traits>
struct GdnWeigher : ConsumerBase<Traits> {
  using ConsumerBase<Traits>::p;
  using ConsumerBase<Traits>::layout;
  using ConsumerBase<Traits>::lane;
  // Lanes by which a row of weights is made, four vectors, of two tokens, each; rows made at a time.
  static constexpr int kQuads = Traits::kMaxTokens == 1 ? 1 : Traits::kVectors / 4, kRowsAtOnce = 32 / kQuads;

  __device__ int token(int tile) const { return tile * 4 + lane / 8; }

  // One of a row of products, which holds the vectors that there are: lane (g, c) has vector g of a tile.
  __device__ void store(float* row, int tile, float product) const {
    if (lane / 4 < Traits::kWeightPitch) row[8 * tile + lane / 4] = product;
  }

  __device__ WeightRows<Traits> products(const char* keys) const {
    return {reinterpret_cast<float*>(const_cast<char*>(keys) + layout.productOffset)};
  }

  // 1 / |k| or 1 / (|q| sqrt(N)) of vector g of each tile.
  __device__ void norms(float (&factor)[Traits::kTiles], const Vectors<Traits>& vectors) const {
    using A = Activation<typename Traits::Act>;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      float squares = 0.0f;
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) {
        const uint4 v = vectors.part[tile][b];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          squares = fmaf(A::low(words[i]), A::low(words[i]), fmaf(A::high(words[i]), A::high(words[i]), squares));
        }
      }
      squares += __shfl_xor_sync(kAllLanes, squares, 1);
      squares += __shfl_xor_sync(kAllLanes, squares, 2);
      float norm = sqrtf(squares + kNormEps);
      factor[tile] = 1.0f / (lane & 4 ? norm * sqrtf(static_cast<float>(Traits::kStateDim)) : norm);
    }
  }

  // Of records first .. first + 7, each times its lane's own factor and the vectors'.
  template <class Keep>
  __device__ void multiplyRows(float* rows, const char* keys, const Vectors<Traits>& vectors,
                               const float (&factor)[Traits::kTiles], int first, int count, const Keep& keep) const {
#pragma unroll
    for (int pair = 0; pair < Traits::kTilePairs; ++pair) {
      float dot[4];
      keyDots<Traits>(dot, keys, first, count, vectors, pair, lane);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int record = 2 * (lane % 4) + e;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int tile = 2 * pair + half;
          if (tile < Traits::kTiles) {
            keep(rows + record * Traits::kWeightPitch, first + record, tile, factor[tile] * dot[2 * half + e]);
          }
        }
      }
    }
  }

  // What a chunk's heads share, into its key buffer, in rows as of weights: the vectors' factors; normalised vectors times
  // committed keys; normalised vectors times normalised keys of this step, where token i enters: keys of later tokens,
  // and queries from its own.
  __device__ void multiply(const ItemHeader& item, char* keys) const {
    const int pending = item.pending(), tokens = item.tokens();
    const WeightRows<Traits> rows = products(keys);
    Vectors<Traits> vectors;
    vectors.load(keys + pending * Traits::kKeyPitch, keys + layout.queryOffset, tokens, lane);
    float factor[Traits::kTiles], keyFactor = 0.0f;  // of token `lane`
    norms(factor, vectors);
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const float own = __shfl_sync(kAllLanes, factor[tile], lane % 4 * 8);
      if (lane / 4 == tile) keyFactor = own;
      if (lane % 4 == 0) store(rows.scale(), tile, token(tile) < tokens ? factor[tile] : 0.0f);
    }
#pragma unroll 1
    for (int first = 0; first < pending; first += 8) {
      multiplyRows(rows.record(first), keys, vectors, factor, first, pending,
                   [&](float* row, int, int tile, float product) { store(row, tile, product); });
    }
#pragma unroll
    for (int step = 0; step < Traits::kTokenSteps; ++step) {
      if (8 * step >= tokens) break;
      const bool query = (lane & 4) != 0;
      multiplyRows(rows.token(pending, 8 * step), keys, vectors, factor, pending + 8 * step, pending + tokens,
                   [&](float* row, int record, int tile, float product) {
                     const int i = record - pending, t = token(tile);
                     const float own = __shfl_sync(kAllLanes, keyFactor, i & 31);
                     const bool enters = (i < t || (query && i == t)) && t < tokens;
                     if (i < tokens) store(row, tile, enters ? own * product : 0.0f);
                   });
    }
    __syncwarp();
  }

  // This step's keys and their factors into the ring, for the group.
  __device__ void appendKeys(const ItemHeader& item, const char* keys) const {
    this->appendKeyRows(item, keys);
    float* ring = p.ringKeyFactor + item.slot * p.ringKeyFactorSlotStride +
                  static_cast<int64_t>(item.head() / p.headsPerGroup) * p.ringRows;
    if (lane < item.tokens()) ring[this->ringRow(item, lane)] = products(keys).scale()[2 * lane];
  }

  // This step's log-decays into the ring, for the head.
  __device__ void appendDecays(const ItemHeader& item, const float* logDecay) const {
    if (item.ordinal() != 0 || lane >= item.tokens()) return;
    p.ringDt[item.slot * p.ringDtSlotStride + static_cast<int64_t>(item.head()) * p.ringRows +
             this->ringRow(item, lane)] = logDecay[item.pending() + lane];
  }

  // Four weights of a row: products times the decays of their two tokens.
  __device__ void put(float* weights, const float* products, float first, float second) const {
    const int place = lane % kQuads * 4;
    const float4 x = *reinterpret_cast<const float4*>(products + place);
    *reinterpret_cast<float4*>(weights + place) = make_float4(first * x.x, first * x.y, second * x.z, second * x.w);
  }

  // exp of the log-decays of tokens i + 1 .. t, added in order, for the lane's two tokens t.
  __device__ void decaysAfter(float (&factor)[2], int i, float draft) const {
    const int t = lane % kQuads * 2;
    float sum[2] = {};
#pragma unroll
    for (int s = 1; s < Traits::kMaxTokens; ++s) {
      const float one = __shfl_sync(kAllLanes, draft, s);
      if (s > i && s <= t) sum[0] += one;
      if (s > i && s <= t + 1) sum[1] += one;
    }
    factor[0] = expf(sum[0]);
    factor[1] = expf(sum[1]);
  }

  // Once a head, not once a warp and item: 64-bit products.
  __device__ void target(const ItemHeader& item, char* slot) const {
    if (lane != 0) return;
    HeadTargets* targets = reinterpret_cast<HeadTargets*>(slot + layout.targetOffset);
    targets->out = outputOf<Traits>(p, item);
    targets->ring = static_cast<__half*>(p.ringValue) + item.slot * p.ringValueSlotStride +
                    static_cast<int64_t>(item.head()) * p.ringRows * Traits::kHeadDim;
  }

  // All weights of the item's head.
  __device__ void weigh(const ItemHeader& item, char* slot, const char* keys) const {
    const WeightRows<Traits> from = products(keys), rows{reinterpret_cast<float*>(slot + layout.weightOffset)};
    const float* logDecay = reinterpret_cast<const float*>(slot + layout.dtOffset);
    const int pending = item.pending(), tokens = item.tokens(), t = lane % kQuads * 2;
    Decay decay;
    decay.loadGdn(logDecay, reinterpret_cast<const float*>(keys + layout.factorOffset), pending, tokens, lane);
    const float alpha = expf(decay.prefix), scale = expf(decay.total + decay.prefix);  // of token `lane`
    float factor[2] = {__shfl_sync(kAllLanes, scale, t), __shfl_sync(kAllLanes, scale, t + 1)};
    if (lane < kQuads) put(rows.scale(), from.scale(), factor[0], factor[1]);
    factor[0] = __shfl_sync(kAllLanes, alpha, t);
    factor[1] = __shfl_sync(kAllLanes, alpha, t + 1);
    const int committed = roundUp(pending, 8);  // weights behind h are zero
#pragma unroll 1
    for (int first = 0; first < committed; first += kRowsAtOnce) {
      const int record = first + lane / kQuads;
      const float own = decay.committed(first, record);
      if (record < committed) put(rows.record(record), from.record(record), own * factor[0], own * factor[1]);
    }
#pragma unroll 1
    for (int first = 0; first < Traits::kMaxTokens; first += kRowsAtOnce) {  // zero of tokens that there are not
      const int i = first + lane / kQuads;
      decaysAfter(factor, i, decay.draft);
      if (i < tokens) {
        put(rows.token(pending, i), from.token(pending, i), factor[0], factor[1]);
      } else if (i < Traits::kMaxTokens) {
        *reinterpret_cast<float4*>(rows.token(pending, i) + lane % kQuads * 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
    }
    appendDecays(item, logDecay);
    target(item, slot);
  }
};

}  // namespace replayssm::weighed
