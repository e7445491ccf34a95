// The update kernel: per team, a producer and recorders feed consumer warps that never wait for each other.
// Persistent: a CTA per multiprocessor, which streams its share of all heads. For large batches.
#pragma once

#include "gdn.cuh"
#include "kernels/common/warp_arrival.cuh"
#include "producer.cuh"
#include "recorder.cuh"

namespace replayssm::weighed {

template <class Traits>
using Consumer = GdnConsumer<Traits>;

// A consumer warp of a team: sees the items in order, works on those of its set and hands every stage back.
//
// HAZARD: a warp must wait for every item, also for those of other sets. A barrier's parity tells two successive
// phases apart, no more; a warp that skipped an item could be two phases off.
template <class Traits>
struct ItemLoop {
  const SharedLayout& layout;
  const Barriers barriers;
  char* const share;
  const int lane, set;
  RingCursor at, slotAt, keysAt;

  __device__ char* stage() const { return share + layout.stageStart + at.index * Traits::kStateBytes; }
  __device__ char* slot() const { return share + layout.slotStart + slotAt.index * layout.slotBytes; }
  __device__ const ItemHeader* header() const {
    return reinterpret_cast<const ItemHeader*>(share + layout.headerPlace(at.index));
  }

  __device__ void work(Consumer<Traits>& consumer) {
    const ItemHeader item = *header();
    if (item.has(kZero)) {
      barrierWait(barriers.landed(slotAt.index), slotAt.parity);  // a recorder has waited for the predecessor
      barrierWait(barriers.weighed(slotAt.index), slotAt.parity);
      consumer.writeZeros(item);
      return;
    }
    const char* keys = share + layout.keyPlace(keysAt.index);
    if constexpr (Traits::kSets > 1) consumer.refreshLane();
    float* const state = reinterpret_cast<float*>(stage()) + consumer.warp * kSlab * Traits::kStateDim;
    float sum[Traits::kTiles][4];
    consumer.readItemState(sum, item, state, keys);
    barrierWait(barriers.landed(slotAt.index), slotAt.parity);
    if (consumer.flushes(item)) consumer.flushItem(item, state, slot(), keys);
    barrierWait(barriers.weighed(slotAt.index), slotAt.parity);
    consumer.finishItem(sum, item, slot());
    if (lane == 0) bulkWaitRead();
  }

  __device__ void run(Consumer<Traits>& consumer) {
    int turn = set;  // how many items until the set's next one
    while (true) {
      barrierWait(barriers.full(at.index), at.parity);
      const uint32_t flags = header()->counts;
      if (flags & kEnd) break;
      if ((flags & (kFirst | kZero)) == kFirst) {
        barrierWait(barriers.keysFull(keysAt.index), keysAt.parity);
      }
      if (turn == 0) {
        work(consumer);
        turn = Traits::kSets;
      }
      --turn;
      __syncwarp();
      if (kEveryLaneArrives || lane == 0) barrierArrive(barriers.empty(at.index));
      at.advance(layout.stages);
      if (flags & kHeadDone) slotAt.advance(layout.slots);
      if ((flags & (kLast | kZero)) == kLast) {
        if (kEveryLaneArrives || lane == 0) barrierArrive(barriers.keysEmpty(keysAt.index));
        keysAt.advance(layout.keyBuffers);
      }
    }
    if (lane == 0) bulkWait();
  }
};

// By one warp, a lane for each stage, key buffer and slot.
template <class Traits>
__device__ void initBarriers(const Barriers& barriers, int i) {
  if (i < kMaxStages) {
    barrierInit(barriers.full(i), 1);
    barrierInit(barriers.empty(i), Traits::kSets * Traits::kWarps * kWarpArrivals);
  }
  if (i < kMaxKeyBuffers) {
    barrierInit(barriers.keysFull(i), 32);  // a recorder's lanes
    barrierInit(barriers.multiplied(i), kWarpArrivals);
    barrierInit(barriers.keysEmpty(i), (Traits::kSets * Traits::kWarps + Traits::kRecorders) * kWarpArrivals);
  }
  if (i < Barriers::kSlots) {
    barrierInit(barriers.announced(i), 1);
    barrierInit(barriers.landed(i), 32);
    barrierInit(barriers.weighed(i), Traits::kRecorders * kWarpArrivals);
  }
  barrierInitFence();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    streamedUpdateKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ SharedLayout layout,
                         int workers) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kTeamThreads = 32 * Traits::kTeamWarps;
  const int team = threadIdx.x / kTeamThreads;
  const int warp = threadIdx.x % kTeamThreads / 32, lane = threadIdx.x % 32;
  char* const share = shared + team * layout.teamBytes;
  const Barriers barriers{sharedAddress(share)};
  if (warp == 0) initBarriers<Traits>(barriers, lane);
  __syncthreads();
  releaseDependents();
  if (warp == Traits::kTeamWarps - 1) {
    if (!p.settled) waitForPredecessor();
    Producer<Traits>{p, layout, barriers, sharedAddress(share), share, lane, {}, {}}.run(
        team * gridDim.x + blockIdx.x, workers);
  } else if (warp >= Traits::kSets * Traits::kWarps) {
    waitForPredecessor();
    Recorder<Traits>{p, layout, barriers, sharedAddress(share), share, lane, warp - Traits::kSets * Traits::kWarps, {}, {}}
        .run();
  } else {
    Consumer<Traits> consumer{{p, layout, warp % Traits::kWarps, lane}};
    ItemLoop<Traits>{layout, barriers, share, lane, warp / Traits::kWarps, {}, {}, {}}.run(consumer);
  }
}

}  // namespace replayssm::weighed
