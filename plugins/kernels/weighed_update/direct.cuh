// The update for small batches: one CTA an item, everything loaded at once, no pipeline to set up. One warp weighs the
// records while the others read the state.
#pragma once

#include "kernel.cuh"

namespace replayssm::weighed {

constexpr int kPrefetchRows = 2;  // batches up to here fetch the whole ring into the L2: latency counts, not bytes

// Threads of a multiprocessor: leaves each 128 registers, or 255; plain decoding wants more CTAs, for their loads.
template <class Traits>
constexpr int kDirectThreads =
    Traits::kMaxTokens == 1 ? 640 : 32 * residentWarps(Traits::kTiles, Traits::kBlocks);

template <class Traits>
constexpr int kDirectWarps = Traits::kWarps + 1;

template <class Traits>
__global__ void __launch_bounds__(32 * kDirectWarps<Traits>, kDirectThreads<Traits> / (32 * kDirectWarps<Traits>))
    directUpdateKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ SharedLayout layout) {
  extern __shared__ __align__(128) char shared[];
  const int thread = threadIdx.x, head = blockIdx.x / Traits::kParts, part = blockIdx.x % Traits::kParts;
  const int row = blockIdx.y;
  const int group = head / p.headsPerGroup;
  char* const stage = shared;
  char* const slot = stage + Traits::kStateBytes;
  char* const keys = slot + layout.slotBytes;
  const bool consumes = thread < 32 * Traits::kWarps;
  Consumer<Traits> consumer{{p, layout, thread / 32, thread % 32}};
  const RecordLoader<Traits> loader{p, layout, thread, 32 * kDirectWarps<Traits>};
  releaseDependents();
  if (!p.settled) {
    if (p.programmaticLaunch) loader.prefetchInputs(row, head, group);
    waitForPredecessor();
  }
  RowInfo info = fetchRow(p, row);
  info.tokens = clampedTokens(p, info);
  if (info.idle()) {
    if (p.settled) waitForPredecessor();
    if (consumes) consumer.writeZeros(ItemHeader::make(kZero, row, -1, head, part, 0, 0, 0));
    return;
  }
  const float* state = p.checkpoint + info.slot * p.checkpointSlotStride +
                       (static_cast<int64_t>(head) * Traits::kHeadDim + part * Traits::kRows) * Traits::kStateDim;
  if (consumes) loadState<Traits>(state, sharedAddress(stage), thread);
  if (!p.settled) loader.queries(info, row, group, sharedAddress(keys));
  fetchCursors(p, info);
  if (!p.settled && p.rows <= kPrefetchRows) loader.prefetchRing(info, head, group, part);
  const auto load = [&](int first, int last) {
    loader.keys(info, row, group, first, last, sharedAddress(keys));
    loader.template values<Traits::kRows>(info, row, head, first, last, part * Traits::kRows, sharedAddress(slot));
    loader.numbers(info, row, head, first, last, sharedAddress(slot));
  };
  loader.factors(info, group, sharedAddress(keys));
  if (p.settled) {
    load(0, info.pending);
    waitForPredecessor();
    loader.queries(info, row, group, sharedAddress(keys));
  }
  load(p.settled ? info.pending : 0, info.pending + info.tokens);
  loader.rates(info, row, head, sharedAddress(slot));
  loadsDrain();
  __syncthreads();
  const ItemHeader item = ItemHeader::make(0, row, info.slot, head, part, info.origin, info.pending, info.tokens);
  float* const slab = reinterpret_cast<float*>(stage) + consumer.warp * kSlab * Traits::kStateDim;
  float sum[Traits::kTiles][4];
  if (consumes) {
    consumer.template readItemState<Traits::kBlocks>(sum, item, slab, keys);
  } else {
    const Weigher<Traits> weigher{{p, layout, 0, thread % 32}};
    weigher.multiply(item, keys);
    weigher.weigh(item, slot, keys);
    if (part == 0 && head == group * p.headsPerGroup) weigher.appendKeys(item, keys);
  }
  __syncthreads();
  if (consumes) {
    consumer.finishItem(sum, item, slot);
    if (consumer.flushes(item)) consumer.flushItem(item, slab, slot, keys);
  }
  if (thread % 32 == 0) bulkWait();
}

}  // namespace replayssm::weighed
