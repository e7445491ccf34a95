// The skipping update for small batches: a CTA a head, as ../replay_update/direct.cuh, but the state waits for the
// decision, which waits for the head's records.
#pragma once

#include "../replay_update/direct.cuh"
#include "kernel.cuh"

namespace replayssm {

// The branch of readItemState once more: through that function it compiles to other code.
template <class Traits>
__device__ __forceinline__ void takeItem(SkippingConsumer<Traits>& consumer, const ItemHeader& item, char* stage,
                                         const char* keys) {
  float sum[Traits::kTiles][4] = {};
  if (item.has(kFaded)) {
    consumer.clearBeforeFlush(item, stage);
  } else {
    consumer.Consumer<Traits>::readItemState(sum, item, stage);
  }
  consumer.finishItem(sum, item, stage, keys);
}

template <class Traits>
__global__ void __launch_bounds__(32 * Traits::kWarps, kDirectThreads / (32 * Traits::kWarps))
    skippingDirectKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ SharedLayout layout,
                         float logThreshold) {
  extern __shared__ __align__(128) char shared[];
  const int thread = threadIdx.x, head = blockIdx.x, row = blockIdx.y;
  const int group = head / p.headsPerGroup;
  char* const stage = shared + layout.keyBufferBytes;
  SkippingConsumer<Traits> consumer{{{p, layout, thread / 32, thread % 32}}};
  waitForPredecessor();
  RowInfo info = fetchRow(p, row);
  info.tokens = clampedTokens(p, info);
  if (info.slot < 0 || info.tokens == 0) {
    consumer.writeZeros(ItemHeader::make(kZero, row, -1, head, 0, 0, 0, 0));
    return;
  }
  const RecordLoader<Traits> loader{p, layout, thread, 32 * Traits::kWarps};
  fetchCursors(p, info);
  loader.queries(info, row, group, sharedAddress(shared));
  loader.committedKeys(info, group, sharedAddress(shared));
  loader.tokenKeys(info, row, group, sharedAddress(shared));
  loader.committedValues(info, head, sharedAddress(stage));
  loader.tokenValues(info, row, head, sharedAddress(stage));
  loader.numbers(info, row, head, sharedAddress(stage));
  releaseDependents();
  // every warp decides for itself, from the same numbers in the same order
  const bool faded = (fadedHeads(p, info, row, head, 1, logThreshold, thread % 32) & 1u) != 0;
  if (!faded) {
    const float* state = p.checkpoint + info.slot * p.checkpointSlotStride +
                         static_cast<int64_t>(head) * Traits::kHeadDim * Traits::kStateDim;
    loadState<Traits>(state, sharedAddress(stage), thread);
  }
  loadsDrain();
  __syncthreads();
  const ItemHeader item =
      ItemHeader::make(faded ? kFaded : 0u, row, info.slot, head, 0, info.origin, info.pending, info.tokens);
  consumer.loadVectors(item, shared);
  consumer.loadProducts(item, shared);
  takeItem<Traits>(consumer, item, stage, shared);
  if (thread < 32 && head == group * p.headsPerGroup) consumer.appendKeys(item, shared);
  if (thread % 32 == 0) bulkWait();
}

}  // namespace replayssm
