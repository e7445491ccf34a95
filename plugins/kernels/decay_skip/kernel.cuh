// The Mamba-2 update that reads no checkpoint of a head that has forgotten it: such a head's step uses zero, and its
// flush only writes. Everything else is the update's own code, see ../replay_update.
//
// Persistent kernel for large batches. The producer decides a chunk ahead, while the stages before it are consumed, so
// that the decision waits for its records behind the stream, not in front of it.
#pragma once

#include "../replay_update/kernel.cuh"
#include "faded.cuh"

namespace replayssm {

constexpr HeaderFlags kFaded = static_cast<HeaderFlags>(32);  // beside the flags of traits.cuh: no state was loaded

template <class Traits>
struct SkippingProducer : Producer<Traits> {
  using Base = Producer<Traits>;
  const float logThreshold;

  __device__ SkippingProducer(const Base& base, float threshold) : Base(base), logThreshold(threshold) {}

  __device__ uint32_t decide(const Chunk& chunk, RowInfo info) const {
    info.tokens = clampedTokens(this->p, info);
    return fadedHeads(this->p, info, chunk.row, chunk.head, chunk.count, logThreshold, this->lane);
  }

  __device__ void run(int worker, int workers) {
    HeadWalk walk(this->p, worker, workers, this->lane);
    uint32_t faded = decide(walk.chunk, walk.info), nextFaded = 0;
    int ordinal = 0;
#pragma unroll 1
    while (!walk.ended()) {
      const bool skip = (faded >> walk.done & 1u) != 0;
      this->sendItem(walk, !skip, skip ? kFaded : 0u, ordinal);
      const bool last = walk.last();
      if (last && !walk.zero()) ++ordinal;
      if (walk.fresh) walk.lookAhead();
      if (walk.first()) nextFaded = decide(walk.next, walk.nextInfo);
      walk.advance();
      if (last) faded = nextFaded;
    }
    this->sendEnd();
    walk.list.finish(this->lane);
    loadsDrain();
  }
};

// What a consumer warp does with an item whose head has faded, or not.
template <class Traits>
__device__ __forceinline__ void consumeItem(Consumer<Traits>& consumer, const ItemHeader& item, char* stage,
                                            const char* keys) {
  float sum[Traits::kTiles][4] = {};
  if (item.has(kFaded)) {
    if (item.pending() + item.tokens() > consumer.p.window) {
      clearSlab<Traits>(reinterpret_cast<float*>(stage) + consumer.warp * kSlab * Traits::kStateDim, consumer.lane);
    }
  } else {
    consumer.readItemState(sum, stage);
  }
  consumer.finishItem(sum, item, stage, keys);
}

template <class Traits>
struct SkippingItemLoop : ItemLoop<Traits> {
  __device__ void run(Consumer<Traits>& consumer, char* share) {
    const SharedLayout& layout = this->layout;
    RingCursor at;
    while (true) {
      barrierWait(this->barriers.full(at.index), at.parity);
      char* stage = share + layout.stageOffset(at.index);
      const ItemHeader item = this->readHeader(stage);
      if (item.has(kEnd)) break;
      const int buffer = layout.keyBuffers == 1 ? 0 : item.chunk() & 1;
      const uint32_t keyParity = layout.keyBuffers == 1 ? item.chunk() & 1 : item.chunk() >> 1;
      const char* keys = share + layout.keyOffset(buffer);
      if (item.has(kZero)) {
        consumer.writeZeros(item);
      } else {
        if (item.has(kFirst)) {
          barrierWait(this->barriers.keysFull(buffer), keyParity);
          consumer.loadVectors(item, keys);
          if (consumer.warp == 0 && item.has(kAppendKeys)) consumer.appendKeys(item, keys);
        }
        consumeItem<Traits>(consumer, item, stage, keys);
      }
      __syncwarp();
      if (this->lane == 0) {
        barrierArrive(this->barriers.empty(at.index));
        if (item.has(kLast) && !item.has(kZero)) barrierArrive(this->barriers.keysEmpty(buffer));
      }
      at.advance(layout.stages);
    }
    if (this->lane == 0) bulkWait();
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    skippingStreamedKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ SharedLayout layout,
                           float logThreshold, int workers) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kTeamThreads = 32 * (Traits::kWarps + 1);
  const int team = threadIdx.x / kTeamThreads;
  const int warp = threadIdx.x % kTeamThreads / 32, lane = threadIdx.x % 32;
  char* const share = shared + team * layout.teamBytes;
  const Barriers barriers{sharedAddress(share)};
  if (warp == 0) initBarriers<Traits>(barriers, lane);
  __syncthreads();
  releaseDependents();
  if (warp == Traits::kWarps) {
    waitForPredecessor();
    const Producer<Traits> base{p, layout, barriers, sharedAddress(share), share, lane, {}, {}};
    SkippingProducer<Traits>(base, logThreshold).run(team * gridDim.x + blockIdx.x, workers);
  } else {
    Consumer<Traits> consumer{{p, layout, warp, lane}};
    SkippingItemLoop<Traits>{{layout, barriers, lane}}.run(consumer, share);
  }
}

}  // namespace replayssm
