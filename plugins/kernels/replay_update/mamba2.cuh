// What a consumer warp does with a Mamba-2 item of several tokens (paper, Eq. 6): state read out, committed records, this
// step's tokens. single.cuh has that of one token.
#pragma once

#include "../common/store_again.cuh"
#include "consumer.cuh"
#include "few.cuh"

namespace replayssm {

// Per lane, for tokens g and g + 8.
struct TokenFactors {
  float decay[2];  // exp of the log-decay from the newest committed record to the token, 0 for tokens not given
};

// A tile of committed records from `first` on: weight dt exp(decay to the token) <k, q>; `dot` as keyDots makes it.
template <class Traits>
__device__ __forceinline__ void addCommitted(float (&sum)[Traits::kTiles][4], const float (&dot)[4], const char* values,
                                             const Decay& decay, const TokenFactors& factors, int first, int pending,
                                             int lane) {
  const int record = first + 2 * (lane % 4);
  float x[4], w[Traits::kTiles][2];
  valueFragment<Traits>(x, values, record, record + 1, pending, lane);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float weight = decay.committed(first, record + e);
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) w[tile][e] = weight * factors.decay[tile] * dot[2 * tile + e];
  }
  addValues<Traits>(sum, x, w);
}

// The step's queries, and what their products with the keys are: the same for all heads of a chunk. Kept in registers for
// up to 8 tokens and 16 committed records; others are multiplied anew for every head.
template <class Traits>
struct ChunkVectors {
  static constexpr bool kKeeps = Traits::kTiles == 1;
  static constexpr int kKeptTiles = kKeeps ? 2 : 0;
  Vectors<Traits> queries{};
  float committed[2][4], token[4];

  __device__ void multiply(const char* keys, int pending, int tokens, int lane) {
    if constexpr (kKeeps) {
      keyDots<Traits>(token, keys, pending, pending + tokens, queries, 0, lane);
#pragma unroll
      for (int i = 0; i < kKeptTiles; ++i) {
        if (8 * i < pending) {
          keyDots<Traits>(committed[i], keys, 8 * i, pending, queries, 0, lane);
        } else {
#pragma unroll
          for (float& dot : committed[i]) dot = 0.0f;
        }
      }
    }
  }
};

// This step's tokens as records, one tile from token `first` on: token i enters token t >= i with its decay in between,
// dt and <k, q>, and itself with the skip.
template <class Traits>
__device__ __forceinline__ void addDrafts(float (&sum)[Traits::kTiles][4], const char* keys, const char* values,
                                          const ChunkVectors<Traits>& vectors, const Decay& decay, float skip,
                                          int first, int pending, int tokens, int lane) {
  const int i0 = first + 2 * (lane % 4);
  float dot[4], x[4], w[Traits::kTiles][2];
  if constexpr (ChunkVectors<Traits>::kKeeps) {
#pragma unroll
    for (int e = 0; e < 4; ++e) dot[e] = vectors.token[e];
  } else {
    keyDots<Traits>(dot, keys, pending + first, pending + tokens, vectors.queries, 0, lane);
  }
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
  addTokenValues<Traits>(sum, x, w, first, allFinite(x), lane);
}

// sum += the records' part of the outputs: committed records, then this step's tokens.
template <class Traits>
__device__ __forceinline__ void readRecords(float (&sum)[Traits::kTiles][4], const char* keys, const char* values,
                                            const ChunkVectors<Traits>& vectors, const Decay& decay, float skip,
                                            int pending, int tokens, int lane) {
  TokenFactors factors;
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
    int token = tile * 8 + lane / 4;
    float prefix = __shfl_sync(kAllLanes, decay.prefix, token);
    factors.decay[tile] = token < tokens ? expf(prefix) : 0.0f;
  }
  for (int first = 0; first < tokens; first += 8) {
    addDrafts<Traits>(sum, keys, values, vectors, decay, skip, first, pending, tokens, lane);
  }
  constexpr int kKept = ChunkVectors<Traits>::kKeptTiles;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (8 * i < pending) {
      addCommitted<Traits>(sum, vectors.committed[i], values, decay, factors, 8 * i, pending, lane);
    }
  }
#pragma unroll 2
  for (int first = 8 * kKept; first < pending; first += 8) {
    float dot[4];
    keyDots<Traits>(dot, keys, first, pending, vectors.queries, 0, lane);
    addCommitted<Traits>(sum, dot, values, decay, factors, first, pending, lane);
  }
}

template <class Traits>
struct Mamba2Consumer : ConsumerBase<Traits> {
  static constexpr int kTiles = Traits::kTiles;
  using Act = typename Traits::Act;
  using ConsumerBase<Traits>::p;
  using ConsumerBase<Traits>::layout;
  using ConsumerBase<Traits>::warp;
  using ConsumerBase<Traits>::lane;
  ChunkVectors<Traits> vectors;
  // Where the lane's part of a chunk goes, were it of head 0: outputs of row g from token 2c on; eight values of token
  // lane / 2 in the ring; dt of token `lane`.
  Act* outAt = nullptr;
  Act* ringAt = nullptr;
  float* ringDtAt = nullptr;

  // Values and dt of this step into ring rows h, h + 1, ... (behind the committed ones; nobody reads those now).
  __device__ void appendRecords(const ItemHeader& item, const char* values, const float* dt) const {
    const int64_t rows = static_cast<int64_t>(item.head()) * p.ringRows;
    if (lane / 2 < item.tokens()) {
      *reinterpret_cast<uint4*>(ringAt + rows * Traits::kHeadDim) = *reinterpret_cast<const uint4*>(
          values + (item.pending() + lane / 2) * Traits::kValuePitch + (lane & 1) * 16);
    }
    if (warp == 0 && lane < item.tokens()) ringDtAt[rows] = dt[item.pending() + lane];
  }

  __device__ void appendKeys(const ItemHeader& item, const char* keys) const { this->appendKeyRows(item, keys); }

  __device__ Act* outputs(const ItemHeader& item) const {
    return static_cast<Act*>(p.out) + item.row * p.outRowStride + 2 * (lane % 4) * p.outTokenStride + warp * kSlab +
           lane / 4;
  }

  // The step's vectors and where its results go, once a chunk.
  __device__ void loadVectors(const ItemHeader& item, const char* keys) {
    outAt = outputs(item);
    ringAt = static_cast<Act*>(p.ringValue) + item.slot * p.ringValueSlotStride +
             this->ringRow(item, lane / 2) * Traits::kHeadDim + warp * kSlab + (lane & 1) * 8;
    ringDtAt = p.ringDt + item.slot * p.ringDtSlotStride + this->ringRow(item, lane);
    const char* rows = keys + layout.queryOffset;
    vectors.queries.load(rows, rows, item.tokens(), lane);
  }
  __device__ void loadProducts(const ItemHeader& item, const char* keys) {
    vectors.multiply(keys, item.pending(), item.tokens(), lane);
  }

  // Whether the keys are not needed any more once the chunk's products are made.
  __device__ bool keysDone(const ItemHeader& item) const {
    return item.pending() <= 8 * ChunkVectors<Traits>::kKeptTiles && !flushes(item) && ChunkVectors<Traits>::kKeeps;
  }

  __device__ void writeZeros(const ItemHeader& item) const {
    float zero[Traits::kTiles][4] = {};
    writeOutput(item, outputs(item), zero);
  }

  // Lane (g, c) holds rows g, g + 8 and tokens 2c, 2c + 1 of each tile; tokens from num_tokens on are written as zero.
  __device__ void writeOutput(const ItemHeader& item, Act* chunk, const float (&sum)[Traits::kTiles][4]) const {
    Act* out = chunk + item.head() * p.outHeadStride;
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = tile * 8 + 2 * (lane % 4) + e;
        const bool real = token < item.tokens();
        uint16_t* at = reinterpret_cast<uint16_t*>(out + (tile * 8 + e) * p.outTokenStride);
        const uint16_t first = Activation<Act>::fromFloat(real ? sum[tile][e] : 0.0f);
        const uint16_t second = Activation<Act>::fromFloat(real ? sum[tile][2 + e] : 0.0f);
        if (token < p.tokens) {
          storeAgain(at, first);
          storeAgain(at + 8, second);
        }
      }
    }
  }

  // sum = S q, not decayed yet: needs the state and the queries only.
  __device__ void readItemState(float (&sum)[Traits::kTiles][4], const ItemHeader&, const char* stage) const {
    const float* slab = reinterpret_cast<const float*>(stage) + warp * kSlab * Traits::kStateDim;
    readState<Traits>(sum, slab, vectors.queries, lane);
  }

  __device__ bool flushes(const ItemHeader& item) const { return item.pending() + item.tokens() > p.window; }

  // The records' part and the state's decay, after the state's flush where it is due: for few records.
  __device__ void addFew(float (&sum)[Traits::kTiles][4], const ItemHeader& item, float* slab, const char* keys,
                         const FewRecords<Traits>& few, float skip) {
    float weights[2][2];
    few.weightsOf(weights[0], 0);
    few.weightsOf(weights[1], 1);
    if (flushes(item)) {
      few.fold(slab, keys, weights);
      this->storeSlab(item, slab);
    }
    few.decayState(sum);
    few.addCommitted(sum, vectors.committed[0], 0, weights[0]);
    few.addCommitted(sum, vectors.committed[1], 1, weights[1]);
    few.addTokens(sum, vectors.token, skip);
  }

  // The same for any number.
  __device__ void addMany(float (&sum)[Traits::kTiles][4], const ItemHeader& item, float* slab, const char* keys,
                          const char* values, const Decay& decay, float skip) {
    if (flushes(item)) this->template flush<Act>(item, slab, keys, values, decay);
#pragma unroll
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int token = tile * 8 + 2 * (lane % 4) + e;
        float factor = expf(decay.total + __shfl_sync(kAllLanes, decay.prefix, token));
        sum[tile][e] *= factor;
        sum[tile][2 + e] *= factor;
      }
    }
    readRecords<Traits>(sum, keys, values, vectors, decay, skip, item.pending(), item.tokens(), lane);
  }

  // What is left once the outputs are known.
  __device__ void deliver(const float (&sum)[Traits::kTiles][4], const ItemHeader& item, const char* values,
                          const float* dt) const {
    writeOutput(item, outAt, sum);
    appendRecords(item, values, dt);
    if (lane == 0 && flushes(item)) bulkWaitRead();
  }

  // The rest, with all of the item in place.
  __device__ void finishItem(float (&sum)[Traits::kTiles][4], const ItemHeader& item, char* stage,
                             const char* keys) {
    finish<true>(sum, item, stage, keys);
  }

  // All of an item; the records' weights do not need the state, so their long chain runs beside its read-out.
  __device__ void takeItem(const ItemHeader& item, char* stage, const char* keys) {
    float sum[Traits::kTiles][4] = {};
    finish<false>(sum, item, stage, keys);
  }

 private:
  // kRead: sum holds S q already.
  template <bool kRead>
  __device__ void finish(float (&sum)[Traits::kTiles][4], const ItemHeader& item, char* stage, const char* keys) {
    float* slab = reinterpret_cast<float*>(stage) + warp * kSlab * Traits::kStateDim;
    const char* values = stage + layout.valueOffset + warp * kSlab * 2;
    const float* dt = reinterpret_cast<const float*>(stage + layout.dtOffset);
    const float* scalars = reinterpret_cast<const float*>(stage + layout.scalarOffset);
    const float skip = p.skip != nullptr ? scalars[1] : 0.0f;
    const bool isFew = ChunkVectors<Traits>::kKeeps && item.pending() <= kFewRecords;
    if constexpr (ChunkVectors<Traits>::kKeeps) {
      if (isFew) {
        FewRecords<Traits> few(dt, scalars[0], item.pending(), item.tokens(), lane);
        if constexpr (!kRead) readItemState(sum, item, stage);
        few.loadValues(values);
        addFew(sum, item, slab, keys, few, skip);
      }
    }
    if (!isFew) {
      if constexpr (!kRead) readItemState(sum, item, stage);
      Decay decay;
      decay.loadMamba2(dt, scalars[0], item.pending(), item.tokens(), lane);
      addMany(sum, item, slab, keys, values, decay, skip);
    }
    deliver(sum, item, values, dt);
  }
};

}  // namespace replayssm
