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

// A consumer warp of a team: sees the items of its set, and hands back stage, keys and slot as soon as each is done with.
//
// HAZARD: a barrier's parity tells two successive phases apart, no more, and a stage's items between two of a set are
// others'. The number in its header, which is written when the item before has been read, tells that the phase is the
// item's. The barriers of key buffers and slots: see Producer::announce and withStages.
template <class Traits>
struct ItemLoop {
  const SharedLayout& layout;
  const Barriers barriers;
  char* const share;
  const int lane;
  uint32_t number;  // of the set's next item
  RingCursor at;

  __device__ char* stage() const { return share + layout.stageStart + at.index * Traits::kStateBytes; }
  __device__ const StageHeader* header() const {
    return reinterpret_cast<const StageHeader*>(share + layout.headerPlace(at.index));
  }

  // To the stage `items` items on.
  __device__ void skip(int items) {
    number += items;
#pragma unroll
    for (int i = 0; i < items; ++i) at.advance(layout.stages);
  }

  __device__ void waitForItem() const {
    if constexpr (Traits::kSets > 1) {
      while (*static_cast<const volatile uint32_t*>(&header()->number) != number) {
      }
    }
    barrierWait(barriers.full(at.index), at.parity);
  }

  // By all lanes, once all are done with it.
  __device__ void handBack(uint32_t barrier) const {
    __syncwarp();
    if (kEveryLaneArrives || lane == 0) barrierArrive(barrier);
  }

  __device__ void zero(Consumer<Traits>& consumer, const ItemHeader& item, ItemPlace place) const {
    handBack(barriers.empty(at.index));
    barrierWait(barriers.weighed(place.slot()), place.slotParity());  // a recorder has waited for the predecessor
    consumer.writeZeros(item);
  }

  __device__ void work(Consumer<Traits>& consumer, const ItemHeader& item, ItemPlace place) const {
    const char* keys = share + layout.keyPlace(place.keys());
    const char* slot = share + layout.slotStart + place.slot() * layout.slotBytes;
    if constexpr (Traits::kSets > 1) consumer.refreshLane();
    float* const state = reinterpret_cast<float*>(stage()) + consumer.warp * kSlab * Traits::kStateDim;
    float sum[Traits::kTiles][4];
    barrierWait(barriers.keysFull(place.keys()), place.keysParity());
    consumer.template readItemState<1>(sum, item, state, keys);
    const bool flushes = consumer.flushes(item);
    if (flushes) {
      barrierWait(barriers.landed(place.slot()), place.slotParity());
      consumer.flushItem(item, state, slot, keys);
    } else {
      handBack(barriers.empty(at.index));
    }
    handBack(barriers.keysEmpty(place.keys()));
    barrierWait(barriers.weighed(place.slot()), place.slotParity());
    consumer.finishItem(sum, item, slot);
    if (flushes) {
      if (lane == 0) bulkWaitRead();
      handBack(barriers.empty(at.index));
    }
  }

  __device__ void run(Consumer<Traits>& consumer) {
#pragma unroll 1
    while (true) {
      waitForItem();
      const ItemHeader item = header()->item;
      if (item.has(kEnd)) break;
      const ItemPlace place = header()->place;
      if (item.has(kZero)) {
        zero(consumer, item, place);
      } else {
        work(consumer, item, place);
      }
      handBack(barriers.released(place.slot()));
      skip(Traits::kSets);
    }
    if (lane == 0) bulkWait();
  }
};

// By one warp, a lane for each stage, key buffer, header and slot.
template <class Traits>
__device__ void initBarriers(const Barriers& barriers, const SharedLayout& layout, const WorkDeal& deal, char* share,
                             int i) {
  if (i < kMaxStages) {
    barrierInit(barriers.full(i), 1);
    barrierInit(barriers.empty(i), Traits::kWarps * kWarpArrivals);
    reinterpret_cast<StageHeader*>(share + layout.headerPlace(i))->number = ~0u;  // no item's
  }
  if (i < kMaxKeyBuffers) {
    barrierInit(barriers.keysFull(i), 32);  // a recorder's lanes
    barrierInit(barriers.multiplied(i), kWarpArrivals);
    barrierInit(barriers.keysEmpty(i),
                (mostHeads(deal) * Traits::kParts * Traits::kWarps + Traits::kWeighers) * kWarpArrivals);
  }
  if (i < kHeads) barrierInit(barriers.announced(i), 1);
  if (i < kMaxSlots) {
    barrierInit(barriers.landed(i), 32);
    barrierInit(barriers.weighed(i), kWarpArrivals);
    barrierInit(barriers.released(i), Traits::kParts * Traits::kWarps * kWarpArrivals);
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
  if (warp == 0) initBarriers<Traits>(barriers, layout, p.deal, share, lane);
  __syncthreads();
  releaseDependents();
  if (warp == Traits::kTeamWarps - 1) {
    if (!p.settled) waitForPredecessor();
    Producer<Traits>{p, layout, barriers, sharedAddress(share), share, lane, {}, {}, {}, {}}.run(
        team * gridDim.x + blockIdx.x, workers);
  } else if (warp == Traits::kTeamWarps - 2) {
    waitForPredecessor();
    Fetcher<Traits>{{p, layout, barriers, share, lane, {}, {}, {}}}.run();
  } else if (warp >= Traits::kSets * Traits::kWarps) {
    waitForPredecessor();
    WeighingLoop<Traits>{{p, layout, barriers, share, lane, {}, {}, {}}}.run(warp - Traits::kSets * Traits::kWarps);
  } else {
    Consumer<Traits> consumer{{p, layout, warp % Traits::kWarps, lane}};
    ItemLoop<Traits> loop{layout, barriers, share, lane, 0, {}};
    loop.skip(warp / Traits::kWarps);
    loop.run(consumer);
  }
}

}  // namespace replayssm::weighed
