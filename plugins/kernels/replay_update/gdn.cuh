// What a consumer warp does with a gated-delta-rule item (paper, Eq. 9-11): outputs, corrections, flush.
//
// Vector 2t of a step is token t's key, vector 2t + 1 its query, so lane (g, c) = (lane / 4, lane % 4) accumulates, for
// rows g and g + 8 and token t = 4 tile + c, what the state and the committed records recall for the key (elements 0
// and 2 of a tile's sum) and contribute to the output (1 and 3). The unit triangular system over the step's tokens is
// then solved token by token; a correction is rounded to float16 before anything uses it.
#pragma once

#include "consumer.cuh"

namespace replayssm {

constexpr float kNormEps = 1e-6f;  // under the root of a key's or query's L2 norm
constexpr float kLargestHalf = 65504.0f;

template <class Traits>
struct GdnConsumer : ConsumerBase<Traits> {
  using Act = typename Traits::Act;
  using ConsumerBase<Traits>::p;
  using ConsumerBase<Traits>::layout;
  using ConsumerBase<Traits>::warp;
  using ConsumerBase<Traits>::lane;
  Vectors<Traits> vectors{};
  float factor[Traits::kTiles];  // of vector g of each tile: 1 / |k|, or 1 / (|q| sqrt(N))

  // The step's keys and queries and their norms, once a chunk.
  __device__ void loadVectors(const ItemHeader& item, const char* keys) {
    using A = Activation<Act>;
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

  // Key rows and their factors, by the warp that appends for the group.
  __device__ void appendKeys(const ItemHeader& item, const char* keys) const {
    this->appendKeyRows(item, keys);
    float* ring = p.ringKeyFactor + item.slot * p.ringKeyFactorSlotStride +
                  static_cast<int64_t>(item.head() / p.headsPerGroup) * p.ringRows;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      int token = tile * 4 + lane / 8;
      if (lane % 8 == 0 && token < item.tokens()) ring[this->ringRow(item, token)] = factor[tile];
    }
  }

  __device__ void readItemState(float (&sum)[Traits::kTiles][4], const char* stage) const {
    const float* slab = reinterpret_cast<const float*>(stage) + warp * kSlab * Traits::kStateDim;
    readState<Traits>(sum, slab, vectors, lane);
  }

  __device__ void writeZeros(const ItemHeader& item) const {
    float zero[Traits::kTiles][4] = {};
    writeOutput(item, zero);
  }

  __device__ void writeOutput(const ItemHeader& item, const float (&sum)[Traits::kTiles][4]) const {
    Act* out = static_cast<Act*>(p.out) + item.row * p.outRowStride + item.head() * p.outHeadStride +
               warp * kSlab + lane / 4;
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

  // sum: decay of the state's part and both factors of every column.
  __device__ void scaleState(float (&sum)[Traits::kTiles][4], const Decay& decay) const {
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      float alpha = expf(decay.total + __shfl_sync(kAllLanes, decay.prefix, tile * 4 + lane % 4));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float scale = alpha * __shfl_sync(kAllLanes, factor[tile], (2 * (lane % 4) + e) * 4);
        sum[tile][e] *= scale;
        sum[tile][2 + e] *= scale;
      }
    }
  }

  // sum += the committed records' part, kRecordTiles tiles of 8 from `first` on, whose chains of instructions overlap.
  template <int kRecordTiles>
  __device__ void addCommitted(float (&sum)[Traits::kTiles][4], const char* keys, const char* values,
                               const Decay& decay, const float (&alpha)[Traits::kTiles], int first,
                               int pending) const {
    float x[kRecordTiles][4], w[kRecordTiles][Traits::kTiles][2];
#pragma unroll
    for (int i = 0; i < kRecordTiles; ++i) {
      const int tileFirst = first + 8 * i, record = tileFirst + 2 * (lane % 4);
      valueFragment<Traits, __half>(x[i], values, record, record + 1, pending, lane);
#pragma unroll
      for (int pair = 0; pair < Traits::kTilePairs; ++pair) {
        float dot[4];
        keyDots<Traits>(dot, keys, tileFirst, pending, vectors, pair, lane);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float weight = decay.committed(tileFirst, record + e);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            int tile = 2 * pair + half;
            if (tile < Traits::kTiles) w[i][tile][e] = weight * alpha[tile] * dot[2 * half + e];
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRecordTiles; ++i) addValues<Traits>(sum, x[i], w[i]);
  }

  using Coupling = float[Traits::kTokenSteps][Traits::kTiles][2];

  // coupling[step][tile][e]: what token 8 step + 2c + e's correction adds to vector g of the tile.
  __device__ void couple(Coupling& coupling, const char* keys, const Decay& decay, int pending, int tokens) const {
#pragma unroll
    for (int step = 0; step < Traits::kTokenSteps; ++step) {
      const int i0 = 8 * step + 2 * (lane % 4);
#pragma unroll
      for (int pair = 0; pair < Traits::kTilePairs; ++pair) {
        float dot[4];
        keyDots<Traits>(dot, keys, pending + 8 * step, pending + tokens, vectors, pair, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int tile = 2 * pair + half;
          if (tile >= Traits::kTiles) continue;
          const int token = tile * 4 + lane / 8;
          const bool query = (lane & 4) != 0;
          float log[2];
          decay.between(log, i0, token, tokens);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float weight = __shfl_sync(kAllLanes, decay.draftWeight, i0 + e) * factor[tile] * expf(log[e]);
            bool past = i0 + e < token || (query && i0 + e == token);
            coupling[step][tile][e] = past && token < tokens ? weight * dot[2 * half + e] : 0.0f;
          }
        }
      }
    }
  }

  // Corrections in order of the tokens, each rounded, appended to the ring and added to what follows.
  __device__ void solve(float (&sum)[Traits::kTiles][4], const Coupling& coupling, const char* values,
                        const float* beta, const ItemHeader& item) const {
    using A = Activation<Act>;
    __half* ring = static_cast<__half*>(p.ringValue) + item.slot * p.ringValueSlotStride +
                   static_cast<int64_t>(item.head()) * p.ringRows * Traits::kHeadDim + warp * kSlab + lane / 4;
#pragma unroll
    for (int token = 0; token < Traits::kMaxTokens; ++token) {
      if (token >= item.tokens()) break;
      const char* value = values + (item.pending() + token) * Traits::kValuePitch + lane / 4 * 2;
      float u[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v = A::toFloat(*reinterpret_cast<const uint16_t*>(value + 16 * half));
        float exact = beta[token] * (v - sum[token / 4][2 * half]);
        exact = fminf(fmaxf(exact, -kLargestHalf), kLargestHalf);
        float owned = __shfl_sync(kAllLanes, exact, (lane & ~3) | (token & 3));
        __half rounded = __float2half_rn(owned);
        u[half] = __half2float(rounded);
        if (lane % 4 == (token & 3)) {
          ring[static_cast<int64_t>(this->ringRow(item, token)) * Traits::kHeadDim + 8 * half] = rounded;
        }
      }
#pragma unroll
      for (int tile = token / 4; tile < Traits::kTiles; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int holder = (2 * (lane % 4) + e) * 4 + (token % 8) / 2;
          float weight = __shfl_sync(kAllLanes, coupling[token / 8][tile][token % 2], holder);
          sum[tile][e] = fmaf(weight, u[0], sum[tile][e]);
          sum[tile][2 + e] = fmaf(weight, u[1], sum[tile][2 + e]);
        }
      }
    }
  }

  __device__ void finishItem(float (&sum)[Traits::kTiles][4], const ItemHeader& item, char* stage, const char* keys) {
    float* slab = reinterpret_cast<float*>(stage) + warp * kSlab * Traits::kStateDim;
    const char* values = stage + layout.valueOffset + warp * kSlab * 2;
    const float* logDecay = reinterpret_cast<const float*>(stage + layout.dtOffset);
    const float* beta = reinterpret_cast<const float*>(stage + layout.scalarOffset);
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
      int token = tile * 4 + lane / 8;
      float prefix = __shfl_sync(kAllLanes, decay.prefix, token);
      alpha[tile] = token < tokens ? expf(prefix) * factor[tile] : 0.0f;
    }
    scaleState(sum, decay);
    int first = 0;
#pragma unroll 1
    for (; pending - first > 8; first += 16) {
      addCommitted<2>(sum, keys, values, decay, alpha, first, pending);
    }
    if (first < pending) addCommitted<1>(sum, keys, values, decay, alpha, first, pending);
    Coupling coupling;
    couple(coupling, keys, decay, pending, tokens);
    solve(sum, coupling, values, beta, item);
    writeOutput(item, sum);
    if (warp == 0 && lane < tokens) {
      p.ringDt[item.slot * p.ringDtSlotStride + static_cast<int64_t>(item.head()) * p.ringRows +
               this->ringRow(item, lane)] = logDecay[pending + lane];
    }
    if (pending + tokens > p.window) this->template flush<__half>(item, slab, keys, values, decay);
  }
};

}  // namespace replayssm
