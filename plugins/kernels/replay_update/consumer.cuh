// What consumer warps of either family do with an item in shared memory: append keys, flush.
//
// Ownership: consumer warp w of a set owns rows 16w..16w+15 of its items' state in shared memory, the same rows of the
// checkpoint, and the same elements of the values it appends. What there is once per head or group is appended by one warp.
#pragma once

#include "../common/mbarrier.cuh"
#include "fold.cuh"
#include "params.h"

namespace replayssm {

template <class Traits>
struct ConsumerBase {
  using Act = typename Traits::Act;
  using Header = typename Traits::Header;
  const UpdateParams& p;
  const typename Traits::Layout& layout;
  const int warp;  // within its set
  int lane;

  // First of the warp's 16 rows within the head.
  __device__ int headRow(const Header& item) const {
    if constexpr (Traits::kParts == 1) return warp * kSlab;
    return item.ordinal() * Traits::kRows + warp * kSlab;
  }

  // Ring row of this step's token.
  __device__ int ringRow(const Header& item, int token) const {
    int row = item.origin() + item.pending() + token;
    return row < p.ringRows ? row : row - p.ringRows;
  }

  __device__ void appendKeyRows(const Header& item, const char* keys) const {
    constexpr int kPieces = Traits::kStateDim / 8;  // 16-byte pieces of a key
    int group = item.head() / p.headsPerGroup;
    for (int i = lane; i < item.tokens() * kPieces; i += 32) {
      int token = i / kPieces, piece = i % kPieces;
      int row = ringRow(item, token);
      Act* ring = static_cast<Act*>(p.ringKey) + item.slot * p.ringKeySlotStride +
                  (static_cast<int64_t>(group) * p.ringRows + row) * Traits::kStateDim + piece * 8;
      *reinterpret_cast<uint4*>(ring) = *reinterpret_cast<const uint4*>(
          keys + (item.pending() + token) * Traits::kKeyPitch + piece * 16);
    }
  }

  // Stores the warp's rows, which lane 0 may hand back after bulkWaitRead.
  __device__ void storeSlab(const Header& item, const float* slab) const {
    asyncProxyFence();
    __syncwarp();
    if (lane == 0) {
      float* target = p.checkpoint + item.slot * p.checkpointSlotStride +
                      (static_cast<int64_t>(item.head()) * Traits::kHeadDim + headRow(item)) * Traits::kStateDim;
      bulkStore(target, sharedAddress(slab), kSlab * Traits::kStateDim * 4);
      bulkCommit();
    }
  }

  // Folds the slab and stores it. Value: what the records' values are.
  template <class Value>
  __device__ void flush(const Header& item, float* slab, const char* keys, const char* values,
                        const Decay& decay) const {
    fold<Traits, Value>(slab, keys, values, decay, item.pending(), lane);
    storeSlab(item, slab);
  }
};

}  // namespace replayssm
