// The update kernel of Mamba-2: per team, one producer warp feeds consumer warps that never wait for each other.
// Persistent: a CTA per multiprocessor, which streams its share of all heads. For large batches.
#pragma once

#include <type_traits>

#include "kernels/common/warp_arrival.cuh"
#include "mamba2.cuh"
#include "producer.cuh"
#include "single.cuh"

namespace replayssm {

template <class Traits>
using Consumer = std::conditional_t<Traits::kSingle, SingleConsumer<Traits>, Mamba2Consumer<Traits>>;

// All of an item that is in place. Workers that read states in another way than a family's own take this one.
template <class Worker>
__device__ __forceinline__ void takeItem(Worker& consumer, const ItemHeader& item, char* stage, const char* keys) {
  float sum[Worker::kTiles][4] = {};
  consumer.readItemState(sum, item, stage);
  consumer.finishItem(sum, item, stage, keys);
}
template <class Traits>
__device__ __forceinline__ void takeItem(Mamba2Consumer<Traits>& consumer, const ItemHeader& item, char* stage,
                                         const char* keys) {
  consumer.takeItem(item, stage, keys);
}

// A team's consumer warp: takes the items in order and hands their stages back.
struct ItemLoop {
  const SharedLayout& layout;
  const Barriers barriers;
  const int lane;

  // The item's header, read by lane 0: the lane that later hands the stage back.
  __device__ ItemHeader readHeader(const char* stage) const {
    int4 word{};
    if (lane == 0) word = *reinterpret_cast<const int4*>(stage + layout.headerOffset);
    return {__shfl_sync(kAllLanes, word.x, 0), __shfl_sync(kAllLanes, word.y, 0),
            static_cast<uint32_t>(__shfl_sync(kAllLanes, word.z, 0)),
            static_cast<uint32_t>(__shfl_sync(kAllLanes, word.w, 0))};
  }

  // Worker: Consumer, or one that reads states in another way.
  template <class Worker>
  __device__ void run(Worker& consumer, char* share) const {
    RingCursor at;
    while (true) {
      barrierWait(barriers.full(at.index), at.parity);
      char* stage = share + layout.stageOffset(at.index);
      const ItemHeader item = readHeader(stage);
      if (item.has(kEnd)) break;
      int buffer = layout.keyBuffers == 1 ? 0 : item.ordinal() & 1;
      uint32_t keyParity = layout.keyBuffers == 1 ? item.ordinal() & 1 : item.ordinal() >> 1;
      const char* keys = share + layout.keyOffset(buffer);
      if (item.has(kZero)) {
        consumer.writeZeros(item);
      } else {
        if (item.has(kFirst)) {
          barrierWait(barriers.keysFull(buffer), keyParity);
          consumer.loadVectors(item, keys);
          consumer.loadProducts(item, keys);
          if (consumer.warp == 0 && item.has(kAppendKeys)) consumer.appendKeys(item, keys);
        }
        takeItem(consumer, item, stage, keys);
      }
      __syncwarp();
      if (kEveryLaneArrives || lane == 0) {
        barrierArrive(barriers.empty(at.index));
        const HeaderFlags last = consumer.keysDone(item) ? kFirst : kLast;  // item of the chunk that needs keys
        if (item.has(last) && !item.has(kZero)) barrierArrive(barriers.keysEmpty(buffer));
      }
      at.advance(layout.stages);
    }
    if (lane == 0) bulkWait();
  }
};

// By one warp, a lane for each stage and key buffer.
template <class Traits>
__device__ void initBarriers(const Barriers& barriers, int i) {
  if (i < kMaxStages) {
    barrierInit(barriers.full(i), 32);  // the producer's lanes
    barrierInit(barriers.empty(i), Traits::kWarps * kWarpArrivals);
  }
  if (i < kMaxKeyBuffers) {
    barrierInit(barriers.keysFull(i), 32);
    barrierInit(barriers.keysEmpty(i), Traits::kWarps * kWarpArrivals);
  }
  barrierInitFence();
}

// A team's consumers wait for its producer, which has set up the barriers and does not wait for them.
template <int kThreads>
__device__ __forceinline__ void teamArrive(int team) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(1 + team), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void teamWait(int team) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(1 + team), "n"(kThreads) : "memory");
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    streamedUpdateKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ SharedLayout layout,
                         int workers) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kTeamThreads = 32 * (Traits::kWarps + 1);
  const int team = threadIdx.x / kTeamThreads;
  const int warp = threadIdx.x % kTeamThreads / 32, lane = threadIdx.x % 32;
  char* const share = shared + team * layout.teamBytes;
  const Barriers barriers{sharedAddress(share)};
  releaseDependents();
  if (warp == Traits::kWarps) {
    initBarriers<Traits>(barriers, lane);
    teamArrive<kTeamThreads>(team);
    if (!p.settled) waitForPredecessor();
    Producer<Traits>{p, layout, barriers, sharedAddress(share), share, lane, {}, {}}.run(
        team * gridDim.x + blockIdx.x, workers);
  } else {
    teamWait<kTeamThreads>(team);
    Consumer<Traits> consumer{{p, layout, warp, lane}};
    ItemLoop{layout, barriers, lane}.run(consumer, share);
  }
}

}  // namespace replayssm
