// Asynchronous loads of an item by any number of cooperating threads: where its records lie in the rings, and its state.
// Only records 0..h-1 (ring) and tokens 0..num_tokens-1 (inputs) are ever read.
#pragma once

#include "../common/mbarrier.cuh"
#include "row_info.cuh"

namespace replayssm {

template <class Traits>
struct LoaderBase {
  using Act = typename Traits::Act;
  const UpdateParams& p;
  const typename Traits::Layout& layout;
  const int thread, threads;

  __device__ int ringRow(const RowInfo& row, int index) const {
    int r = row.origin + index;
    return r < p.ringRows ? r : r - p.ringRows;
  }

  __device__ const Act* ringKeys(const RowInfo& info, int group) const {
    return static_cast<const Act*>(p.ringKey) + info.slot * p.ringKeySlotStride +
           static_cast<int64_t>(group) * p.ringRows * Traits::kStateDim;
  }
  // GDN corrections are 16-bit like activations.
  __device__ const Act* ringValues(const RowInfo& info, int head) const {
    return static_cast<const Act*>(p.ringValue) + info.slot * p.ringValueSlotStride +
           static_cast<int64_t>(head) * p.ringRows * Traits::kHeadDim;
  }
  __device__ const float* ringDt(const RowInfo& info, int head) const {
    return p.ringDt + info.slot * p.ringDtSlotStride + static_cast<int64_t>(head) * p.ringRows;
  }

  // Committed rows of a ring in one or two bulk copies, whose bytes the barrier is told of first. kOnce: no other team of
  // this launch reads them. One thread calls it.
  template <bool kOnce = false>
  __device__ void bulkRows(const RowInfo& info, const Act* ring, int rowBytes, uint32_t target, uint32_t barrier) const {
    if (info.pending == 0) return;
    const int straight = min(info.pending, p.ringRows - info.origin), wrapped = info.pending - straight;
    const char* bytes = reinterpret_cast<const char*>(ring);
    barrierExpect(barrier, info.pending * rowBytes);
    const auto load = [&](uint32_t at, const char* from, int size) {
      if constexpr (kOnce) {
        bulkLoadOnce(at, from, size, barrier);
      } else {
        bulkLoad(at, from, size, barrier);
      }
    };
    load(target, bytes + info.origin * rowBytes, straight * rowBytes);
    if (wrapped > 0) load(target + straight * rowBytes, bytes, wrapped * rowBytes);
  }
};

// An item's state, 16 bytes at a time, by the consumers' threads.
template <class Traits>
__device__ __forceinline__ void loadState(const float* state, uint32_t target, int thread) {
  static_assert(Traits::kStateBytes / 16 % (32 * Traits::kWarps) == 0, "whole rounds of the threads");
#pragma unroll
  for (int i = 0; i < Traits::kStateBytes / 16 / (32 * Traits::kWarps); ++i) {
    int piece = i * 32 * Traits::kWarps + thread;
    pieceLoad(target + piece * 16, state + piece * 4);
  }
}

}  // namespace replayssm
