// The weights of a gated-delta-rule head (paper, Eq. 9-11), see weights.cuh. Vector 2t of a step is token t's key, vector
// 2t + 1 its query; both are normalised by a factor in their weights. A token's row is what its correction adds.
#pragma once

#include "../common/gdn.cuh"
#include "weights.cuh"

namespace replayssm::weighed {

// Lane (g, c) = (lane / 4, lane % 4) of the warp holds the dots of vector g of a tile with records 2c and 2c + 1.
template <class Traits>
struct GdnWeigher : ConsumerBase<Traits> {
  using ConsumerBase<Traits>::p;
  using ConsumerBase<Traits>::layout;
  using ConsumerBase<Traits>::lane;
  Vectors<Traits> vectors{};
  float factor[Traits::kTiles];  // of vector g of each tile: 1 / |k|, or 1 / (|q| sqrt(N))

  __device__ int token(int tile) const { return tile * 4 + lane / 8; }

  // Into a row of weights, which holds the vectors that there are.
  __device__ void store(float* row, int tile, float weight) const {
    if (lane / 4 < Traits::kWeightPitch) row[8 * tile + lane / 4] = weight;
  }

  // The step's keys and queries and their norms, once a chunk.
  __device__ void loadVectors(const ItemHeader& item, const char* keys) {
    using A = Activation<typename Traits::Act>;
    vectors.load(keys + item.pending() * Traits::kKeyPitch, keys + layout.queryOffset, item.tokens(), lane);
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

  // This step's keys and their factors into the ring, for the group.
  __device__ void appendKeys(const ItemHeader& item, const char* keys) const {
    this->appendKeyRows(item, keys);
    float* ring = p.ringKeyFactor + item.slot * p.ringKeyFactorSlotStride +
                  static_cast<int64_t>(item.head() / p.headsPerGroup) * p.ringRows;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      if (lane % 8 == 0 && token(tile) < item.tokens()) ring[this->ringRow(item, token(tile))] = factor[tile];
    }
  }

  // This step's log-decays into the ring, for the head.
  __device__ void appendDecays(const ItemHeader& item, const float* logDecay) const {
    if (item.ordinal() != 0 || lane >= item.tokens()) return;
    p.ringDt[item.slot * p.ringDtSlotStride + static_cast<int64_t>(item.head()) * p.ringRows +
             this->ringRow(item, lane)] = logDecay[item.pending() + lane];
  }

  __device__ void weighCommitted(const WeightRows<Traits>& rows, const char* keys, const Decay& decay,
                                 const float (&alpha)[Traits::kTiles], int first, int pending) const {
#pragma unroll
    for (int pair = 0; pair < Traits::kTilePairs; ++pair) {
      float dot[4];
      keyDots<Traits>(dot, keys, first, pending, vectors, pair, lane);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int record = first + 2 * (lane % 4) + e;
        const float weight = decay.committed(first, record);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int tile = 2 * pair + half;
          if (tile < Traits::kTiles) {
            store(rows.record(record), tile, weight * alpha[tile] * dot[2 * half + e]);
          }
        }
      }
    }
  }

  // The unit triangular system between this step's tokens: token i enters keys of later tokens, and queries from its own.
  __device__ void weighTokens(const WeightRows<Traits>& rows, const char* keys, const Decay& decay, int pending,
                              int tokens) const {
    const Stretches<Traits::kMaxTokens> stretches(decay.draft, lane);
    const bool query = (lane & 4) != 0;
#pragma unroll
    for (int step = 0; step < Traits::kTokenSteps; ++step) {
      if (8 * step >= tokens) break;
#pragma unroll
      for (int pair = 0; pair < Traits::kTilePairs; ++pair) {
        float dot[4];
        keyDots<Traits>(dot, keys, pending + 8 * step, pending + tokens, vectors, pair, lane);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 8 * step + 2 * (lane % 4) + e;
          const float own = __shfl_sync(kAllLanes, decay.draftWeight, i);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int tile = 2 * pair + half;
            if (tile >= Traits::kTiles) continue;
            const int t = token(tile);
            const float weight = own * factor[tile] * expf(stretches.between(i, t)) * dot[2 * half + e];
            const bool enters = (i < t || (query && i == t)) && t < tokens;
            if (i < tokens) store(rows.token(pending, i), tile, enters ? weight : 0.0f);
          }
        }
      }
    }
  }

  // All weights of the item's head.
  __device__ void weigh(const ItemHeader& item, char* slot, const char* keys) const {
    const WeightRows<Traits> rows{reinterpret_cast<float*>(slot + layout.weightOffset)};
    const float* logDecay = reinterpret_cast<const float*>(slot + layout.dtOffset);
    const float* factors = reinterpret_cast<const float*>(keys + layout.factorOffset);
    const int pending = item.pending(), tokens = item.tokens();
    Decay decay;
    decay.loadGdn(logDecay, factors, pending, tokens, lane);
    decay.draftWeight = 0.0f;
    float alpha[Traits::kTiles];
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      float own = __shfl_sync(kAllLanes, factor[tile], lane % 4 * 8);
      if (lane / 4 == tile) decay.draftWeight = own;
      float prefix = __shfl_sync(kAllLanes, decay.prefix, token(tile));
      bool given = token(tile) < tokens;
      alpha[tile] = given ? expf(prefix) * factor[tile] : 0.0f;
      float scale = given ? expf(decay.total + prefix) * factor[tile] : 0.0f;
      if (lane % 4 == 0) store(rows.scale(), tile, scale);
    }
#pragma unroll 2
    for (int first = 0; first < pending; first += 8) weighCommitted(rows, keys, decay, alpha, first, pending);
    weighTokens(rows, keys, decay, pending, tokens);
    appendDecays(item, logDecay);
  }
};

}  // namespace replayssm::weighed
