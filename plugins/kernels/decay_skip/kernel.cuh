// The Mamba-2 update that reads no checkpoint of a head that has forgotten it: such a head's step uses zero, and its
// flush only writes. Everything else is the update's own code, see ../replay_update.
//
// Persistent kernel for large batches. The producer decides a chunk ahead, while the stages before it are consumed, so
// that the decision waits for its records behind the stream, not in front of it.
#pragma once

#include "../replay_update/kernel.cuh"
#include "faded.cuh"

namespace replayssm {

constexpr HeaderFlags kFaded = kFamilyFlag;  // no state was loaded

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

// A consumer warp that looks whether an item's head has faded.
template <class Traits>
struct SkippingConsumer : Consumer<Traits> {
  // The caller has set sum to zero.
  __device__ void readItemState(float (&sum)[Traits::kTiles][4], const ItemHeader& item, char* stage) const {
    if (item.has(kFaded)) {
      clearBeforeFlush(item, stage);
    } else {
      Consumer<Traits>::readItemState(sum, item, stage);
    }
  }

  // What a flush of a faded head folds into.
  __device__ void clearBeforeFlush(const ItemHeader& item, char* stage) const {
    if (item.pending() + item.tokens() > this->p.window) {
      clearSlab<Traits>(reinterpret_cast<float*>(stage) + this->warp * kSlab * Traits::kStateDim, this->lane);
    }
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
    SkippingConsumer<Traits> consumer{{{p, layout, warp, lane}}};
    ItemLoop{layout, barriers, lane}.run(consumer, share);
  }
}

}  // namespace replayssm
