// What a consumer warp does with one item that lies in shared memory: outputs, appended records, flush.
//
// Ownership: consumer warp w owns rows 16w..16w+15 of the item's state in shared memory, the same rows of the
// checkpoint, and elements 16w..16w+15 of the values it appends. Warp 0 appends dt, and a group's keys.
#pragma once

#include "../common/mbarrier.cuh"
#include "fold.cuh"
#include "params.h"

namespace replayssm {

template <class Traits>
struct Consumer {
  using Act = typename Traits::Act;
  const UpdateParams& p;
  const SharedLayout layout;
  const int warp, lane;  // warp within the team
  TokenVectors<Traits> queries{};
  float query[Traits::kBlocks][8];  // plain decoding: the query as float32, see readStateSingle

  // Values and dt of this step into ring rows h, h + 1, ... (behind the committed ones; nobody reads those now).
  __device__ void appendRecords(const ItemHeader& item, const char* values, const float* dt) {
    int token = lane / 2;
    if (token < item.tokens()) {
      int row = item.origin() + item.pending() + token;
      if (row >= p.ringRows) row -= p.ringRows;
      Act* ring = static_cast<Act*>(p.ringValue) + item.slot * p.ringValueSlotStride +
                  (static_cast<int64_t>(item.head()) * p.ringRows + row) * Traits::kHeadDim + warp * kSlab +
                  (lane & 1) * 8;
      *reinterpret_cast<uint4*>(ring) = *reinterpret_cast<const uint4*>(
          values + (item.pending() + token) * Traits::kValuePitch + (lane & 1) * 16);
    }
    if (warp == 0 && lane < item.tokens()) {
      int row = item.origin() + item.pending() + lane;
      if (row >= p.ringRows) row -= p.ringRows;
      p.ringDt[item.slot * p.ringDtSlotStride + static_cast<int64_t>(item.head()) * p.ringRows + row] =
          dt[item.pending() + lane];
    }
  }

  __device__ void appendKeys(const ItemHeader& item, const char* keys) {
    constexpr int kPieces = Traits::kStateDim / 8;  // 16-byte pieces of a key
    int group = item.head() / p.headsPerGroup;
    for (int i = lane; i < item.tokens() * kPieces; i += 32) {
      int token = i / kPieces, piece = i % kPieces;
      int row = item.origin() + item.pending() + token;
      if (row >= p.ringRows) row -= p.ringRows;
      Act* ring = static_cast<Act*>(p.ringKey) + item.slot * p.ringKeySlotStride +
                  (static_cast<int64_t>(group) * p.ringRows + row) * Traits::kStateDim + piece * 8;
      *reinterpret_cast<uint4*>(ring) = *reinterpret_cast<const uint4*>(
          keys + (item.pending() + token) * Traits::kKeyPitch + piece * 16);
    }
  }

  __device__ void loadQueries(const ItemHeader& item, const char* rows) {
    queries.load(rows, item.tokens(), lane);
    if constexpr (Traits::kSingle) {
      using A = Activation<Act>;
      const int swap = lane & 4;
#pragma unroll
      for (int b = 0; b < Traits::kBlocks; ++b) {
        const char* at = rows + b * 64 + lane % 4 * 16;
        uint2 x = *reinterpret_cast<const uint2*>(at + swap * 2);
        uint2 y = *reinterpret_cast<const uint2*>(at + (4 - swap) * 2);
        const uint32_t words[4] = {x.x, x.y, y.x, y.y};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          query[b][2 * i] = A::low(words[i]);
          query[b][2 * i + 1] = A::high(words[i]);
        }
      }
    }
  }

  // Lane (g, c) holds rows g, g + 8 and tokens 2c, 2c + 1 of each tile; tokens from num_tokens on are written as zero.
  __device__ void writeOutput(const ItemHeader& item, const float (&sum)[Traits::kTokenTiles][4]) {
    Act* out = static_cast<Act*>(p.out) + item.row * p.outRowStride + item.head() * p.outHeadStride +
               warp * kSlab + lane / 4;
#pragma unroll
    for (int tile = 0; tile < Traits::kTokenTiles; ++tile) {
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

  // Folds and stores the slab; returns when the slab may be overwritten.
  __device__ void flush(const ItemHeader& item, float* slab, const char* keys, const char* values,
                        const Decay& decay) {
    fold<Traits>(slab, keys, values, decay, item.pending(), lane);
    asyncProxyFence();
    __syncwarp();
    if (lane == 0) {
      float* target = p.checkpoint + item.slot * p.checkpointSlotStride +
                      (static_cast<int64_t>(item.head()) * Traits::kHeadDim + warp * kSlab) * Traits::kStateDim;
      bulkStore(target, sharedAddress(slab), kSlab * Traits::kStateDim * 4);
      bulkCommit();
      bulkWaitRead();
    }
  }

  // sum = S q, not decayed yet: needs the state and the queries only.
  __device__ void readItemState(float (&sum)[Traits::kTokenTiles][4], const char* stage) const {
    const float* slab = reinterpret_cast<const float*>(stage) + warp * kSlab * Traits::kStateDim;
    if constexpr (Traits::kSingle) {
      readStateSingle<Traits>(sum, slab, query, lane);
    } else {
      readState<Traits>(sum, slab, queries, lane);
    }
  }

  // The rest, with all of the item in place.
  __device__ void finishItem(float (&sum)[Traits::kTokenTiles][4], const ItemHeader& item, char* stage,
                             const char* keys) {
    float* slab = reinterpret_cast<float*>(stage) + warp * kSlab * Traits::kStateDim;
    const char* values = stage + layout.valueOffset + warp * kSlab * 2;
    const float* dt = reinterpret_cast<const float*>(stage + layout.dtOffset);
    const float* scalars = reinterpret_cast<const float*>(stage + layout.scalarOffset);
    Decay decay;
    decay.load(dt, scalars[0], item.pending(), item.tokens(), lane);
    float skip = p.skip != nullptr ? scalars[1] : 0.0f;
#pragma unroll
    for (int tile = 0; tile < Traits::kTokenTiles; ++tile) {
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
    if (item.pending() + item.tokens() > p.window) flush(item, slab, keys, values, decay);
  }
};

}  // namespace replayssm
