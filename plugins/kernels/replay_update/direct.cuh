// The update of Mamba-2 for small batches: one CTA a head, everything loaded at once, no pipeline to set up. The state is
// read out while the records, which wait for the cursors, are still on their way.
#pragma once

#include "kernel.cuh"

namespace replayssm {

constexpr int kDirectThreads = 512;  // of a multiprocessor: leaves each 128 registers

template <class Traits>
__global__ void __launch_bounds__(32 * Traits::kWarps, kDirectThreads / (32 * Traits::kWarps))
    directUpdateKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ SharedLayout layout) {
  extern __shared__ __align__(128) char shared[];
  const int thread = threadIdx.x, head = blockIdx.x, row = blockIdx.y;
  const int group = head / p.headsPerGroup;
  char* const stage = shared + layout.keyBufferBytes;
  Consumer<Traits> consumer{{p, layout, thread / 32, thread % 32}};
  if (p.settled) {
    releaseDependents();
  } else {
    waitForPredecessor();
  }
  RowInfo info = fetchRow(p, row);
  info.tokens = clampedTokens(p, info);
  if (info.slot < 0 || info.tokens == 0) {
    if (p.settled) waitForPredecessor();
    consumer.writeZeros(ItemHeader::make(kZero, row, -1, head, 0, 0, 0, 0));
    return;
  }
  const float* state = p.checkpoint + info.slot * p.checkpointSlotStride +
                       static_cast<int64_t>(head) * Traits::kHeadDim * Traits::kStateDim;
  const RecordLoader<Traits> loader{p, layout, thread, 32 * Traits::kWarps};
  loadState<Traits>(state, sharedAddress(stage), thread);
  if (!p.settled) loader.queries(info, row, group, sharedAddress(shared));
  loadsCommit();
  fetchCursors(p, info);
  loader.committedKeys(info, group, sharedAddress(shared));
  loader.committedValues(info, head, sharedAddress(stage));
  if (p.settled) {
    waitForPredecessor();
    loader.queries(info, row, group, sharedAddress(shared));
  }
  loader.tokenKeys(info, row, group, sharedAddress(shared));
  loader.tokenValues(info, row, head, sharedAddress(stage));
  loader.numbers(info, row, head, sharedAddress(stage));
  if (p.settled) {
    loadsDrain();
  } else {
    releaseDependents();
    loadsWaitFirst();
  }
  __syncthreads();
  const ItemHeader item = ItemHeader::make(0, row, info.slot, head, 0, info.origin, info.pending, info.tokens);
  consumer.loadVectors(item, shared);
  float sum[Traits::kTiles][4];
  consumer.readItemState(sum, item, stage);
  loadsDrain();
  __syncthreads();
  consumer.loadProducts(item, shared);
  consumer.finishItem(sum, item, stage, shared);
  if (thread < 32 && head == group * p.headsPerGroup) consumer.appendKeys(item, shared);
  if (thread % 32 == 0) bulkWait();
}

}  // namespace replayssm
