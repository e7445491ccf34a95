// What a consumer warp does with a Mamba-2 item (paper, Eq. 6): state read out, committed records, this step's tokens.
#pragma once

#include "consumer.cuh"

namespace replayssm {

// Per lane, for tokens g and g + 8.
struct TokenFactors {
  float decay[2];  // exp of the log-decay from the newest committed record to the token, 0 for tokens not given
};

// kTiles tiles of committed records from `first` on: weight dt exp(decay to the token) <k, q>.
template <class Traits, int kTiles>
__device__ __forceinline__ void addCommitted(float (&sum)[Traits::kTiles][4], const char* keys, const char* values,
                                             const Vectors<Traits>& q, const Decay& decay,
                                             const TokenFactors& factors, int first, int pending, int lane) {
  float dot[kTiles][4], x[kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    int record = first + 8 * i + 2 * (lane % 4);
    keyDots<Traits>(dot[i], keys, first + 8 * i, pending, q, 0, lane);
    valueFragment<Traits>(x[i], values, record, record + 1, pending, lane);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    float w[Traits::kTiles][2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float weight = decay.committed(first + 8 * i, first + 8 * i + 2 * (lane % 4) + e);
#pragma unroll
      for (int tile = 0; tile < Traits::kTiles; ++tile) {
        w[tile][e] = weight * factors.decay[tile] * dot[i][2 * tile + e];
      }
    }
    addValues<Traits>(sum, x[i], w);
  }
}

// This step's tokens as records, one tile from token `first` on: token i enters token t >= i with its decay in between,
// dt and <k, q>, and itself with the skip.
template <class Traits>
__device__ __forceinline__ void addDrafts(float (&sum)[Traits::kTiles][4], const char* keys, const char* values,
                                          const Vectors<Traits>& q, const Decay& decay, float skip, int first,
                                          int pending, int tokens, int lane) {
  const int i0 = first + 2 * (lane % 4);
  float dot[4], x[4], w[Traits::kTiles][2];
  keyDots<Traits>(dot, keys, pending + first, pending + tokens, q, 0, lane);
  valueFragment<Traits>(x, values, pending + i0, pending + i0 + 1, pending + tokens, lane);
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
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
                                         const Vectors<Traits>& q, float dt, float skip, int pending, int lane) {
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
  float weight = fmaf(dt, dot, skip);
  const char* value = values + pending * Traits::kValuePitch + lane / 4 * 2;
  sum[0][0] = fmaf(weight, A::toFloat(*reinterpret_cast<const uint16_t*>(value)), sum[0][0]);
  sum[0][2] = fmaf(weight, A::toFloat(*reinterpret_cast<const uint16_t*>(value + 16)), sum[0][2]);
}

// sum += the records' part of the outputs: committed records, then this step's tokens.
template <class Traits>
__device__ __forceinline__ void readRecords(float (&sum)[Traits::kTiles][4], const char* keys, const char* values,
                                            const Vectors<Traits>& q, const Decay& decay, float skip, int pending,
                                            int tokens, int lane) {
  TokenFactors factors;
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
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

template <class Traits>
struct Mamba2Consumer : ConsumerBase<Traits> {
  static constexpr int kTiles = Traits::kTiles;
  using Act = typename Traits::Act;
  using ConsumerBase<Traits>::p;
  using ConsumerBase<Traits>::layout;
  using ConsumerBase<Traits>::warp;
  using ConsumerBase<Traits>::lane;
  Vectors<Traits> queries{};

  // Values and dt of this step into ring rows h, h + 1, ... (behind the committed ones; nobody reads those now).
  __device__ void appendRecords(const ItemHeader& item, const char* values, const float* dt) {
    int token = lane / 2;
    if (token < item.tokens()) {
      int row = this->ringRow(item, token);
      Act* ring = static_cast<Act*>(p.ringValue) + item.slot * p.ringValueSlotStride +
                  (static_cast<int64_t>(item.head()) * p.ringRows + row) * Traits::kHeadDim + warp * kSlab +
                  (lane & 1) * 8;
      *reinterpret_cast<uint4*>(ring) = *reinterpret_cast<const uint4*>(
          values + (item.pending() + token) * Traits::kValuePitch + (lane & 1) * 16);
    }
    if (warp == 0 && lane < item.tokens()) {
      int row = this->ringRow(item, lane);
      p.ringDt[item.slot * p.ringDtSlotStride + static_cast<int64_t>(item.head()) * p.ringRows + row] =
          dt[item.pending() + lane];
    }
  }

  __device__ void appendKeys(const ItemHeader& item, const char* keys) const { this->appendKeyRows(item, keys); }

  // The step's vectors, once a chunk.
  __device__ void loadVectors(const ItemHeader& item, const char* keys) {
    const char* rows = keys + layout.queryOffset;
    if constexpr (Traits::kSingle) {
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) {  // by all lanes: the state's rows want it, too
        queries.part[0][b] = *reinterpret_cast<const uint4*>(rows + b * 64 + lane % 4 * 16);
      }
    } else {
      queries.load(rows, rows, item.tokens(), lane);
    }
  }

  __device__ void writeZeros(const ItemHeader& item) const {
    float zero[Traits::kTiles][4] = {};
    writeOutput(item, zero);
  }

  // Lane (g, c) holds rows g, g + 8 and tokens 2c, 2c + 1 of each tile; tokens from num_tokens on are written as zero.
  __device__ void writeOutput(const ItemHeader& item, const float (&sum)[Traits::kTiles][4]) const {
    Act* out = static_cast<Act*>(p.out) + item.row * p.outRowStride + item.head() * p.outHeadStride +
               warp * kSlab + lane / 4;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int token = tile * 8 + 2 * (lane % 4) + e;
        if (token >= p.tokens) continue;
        bool real = token < item.tokens();
        uint16_t* at = reinterpret_cast<uint16_t*>(out + token * p.outTokenStride);
        at[0] = Activation<Act>::fromFloat(real ? sum[tile][e] : 0.0f);
        at[8] = Activation<Act>::fromFloat(real ? sum[tile][2 + e] : 0.0f);
      }
    }
  }

  // sum = S q, not decayed yet: needs the state and the queries only.
  __device__ void readItemState(float (&sum)[Traits::kTiles][4], const ItemHeader&, const char* stage) const {
    const float* slab = reinterpret_cast<const float*>(stage) + warp * kSlab * Traits::kStateDim;
    if constexpr (Traits::kSingle) {
      readStateSingle<Traits>(sum, slab, queries, lane);
    } else {
      readState<Traits>(sum, slab, queries, lane);
    }
  }

  // The rest, with all of the item in place.
  __device__ void finishItem(float (&sum)[Traits::kTiles][4], const ItemHeader& item, char* stage,
                             const char* keys) {
    float* slab = reinterpret_cast<float*>(stage) + warp * kSlab * Traits::kStateDim;
    const char* values = stage + layout.valueOffset + warp * kSlab * 2;
    const float* dt = reinterpret_cast<const float*>(stage + layout.dtOffset);
    const float* scalars = reinterpret_cast<const float*>(stage + layout.scalarOffset);
    Decay decay;
    decay.loadMamba2(dt, scalars[0], item.pending(), item.tokens(), lane);
    float skip = p.skip != nullptr ? scalars[1] : 0.0f;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (Traits::kSingle && e == 1) continue;
        int token = Traits::kSingle ? 0 : tile * 8 + 2 * (lane % 4) + e;
        float factor = expf(decay.total + __shfl_sync(kAllLanes, decay.prefix, token));
        sum[tile][e] *= factor;
        sum[tile][2 + e] *= factor;
      }
    }
    readRecords<Traits>(sum, keys, values, queries, decay, skip, item.pending(), item.tokens(), lane);
    writeOutput(item, sum);
    appendRecords(item, values, dt);
    if (item.pending() + item.tokens() > p.window) {
      this->template flush<Act>(item, slab, keys, values, decay);
      if (lane == 0) bulkWaitRead();
    }
  }
};

}  // namespace replayssm
