// How a block of the attention begins: barriers, the order of the rows, its first item.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "layout.cuh"

namespace replayssm {

// work(order of the rows or null, the block's first item), by all threads.
template <class Traits, class Work>
__device__ __forceinline__ void beginBlock(const AttentionParams& p, const AttentionShared<Traits>& shared, int items,
                                           Work work) {
  if (threadIdx.x < 32) {
    shared.keys().init(Traits::kReaders * kWarpArrivals);
    shared.values().init(Traits::kReaders * kWarpArrivals);
  }
  if (threadIdx.x == 0) {
    barrierInit(shared.queryFull(), 33);
    barrierInit(shared.queryEmpty(), Traits::kConsumers * kWarpArrivals);
  }
  __syncthreads();
  releaseDependents();
  waitForPredecessor();
  // the place of the item as most batches deal it is under way while the rows are looked at
  AttentionItem item = attentionItem<Traits::kRows>(p, nullptr, static_cast<int>(blockIdx.x));
  const uint16_t* order = orderRows<Traits>(p, items, shared.room(), shared.order()) ? shared.order() : nullptr;
  if (order != nullptr) item = attentionItem<Traits::kRows>(p, order, static_cast<int>(blockIdx.x));
  work(order, item);
}

}  // namespace replayssm
