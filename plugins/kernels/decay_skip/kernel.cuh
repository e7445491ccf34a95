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

  __device__ uint32_t decide(const Chunk& chunk, const RowInfo& info) const {
    return fadedHeads(this->p, info, chunk.row, chunk.head, chunk.count, logThreshold, this->lane);
  }

  __device__ void stream(const Chunk& chunk, const RowInfo& info, uint32_t faded, int ordinal) {
    const bool zero = info.slot < 0 || info.tokens == 0;
    const int group = chunk.head / this->p.headsPerGroup;
#pragma unroll 1
    for (int i = 0; i < chunk.count; ++i) {
      const int head = chunk.head + i;
      const bool skip = (faded >> i & 1u) != 0;
      this->openItem(!zero && !skip, info.slot, head);
      const uint32_t flags = (zero ? kZero : 0u) | (i == 0 ? kFirst : 0u) | (i + 1 == chunk.count ? kLast : 0u) |
                             (head == group * this->p.headsPerGroup ? kAppendKeys : 0u) | (skip ? kFaded : 0u);
      this->closeItem(!zero, ItemHeader::make(flags, chunk.row, info.slot, head, info.origin, info.pending, info.tokens,
                                              ordinal), info);
      if (i == 0 && !zero) this->loadKeys(info, chunk.row, group);
    }
  }

  __device__ void run(int worker, int workers) {
    const ChunkList list(this->p, worker, workers);
    Chunk chunk = list.next(0, this->lane);
    RowInfo info = loadRow(this->p, chunk.count > 0 ? chunk.row : -1);
    loadCursors(this->p, info);
    uint32_t faded = decide(chunk, info);
    Chunk next = list.next(1, this->lane);
    RowInfo nextInfo = loadRow(this->p, next.count > 0 ? next.row : -1);
    int ordinal = 0;
#pragma unroll 1
    for (int index = 0; chunk.count > 0; ++index) {
      Chunk later = next.count > 0 ? list.next(index + 2, this->lane) : Chunk{0, 0, 0};
      RowInfo laterInfo = loadRow(this->p, later.count > 0 ? later.row : -1);
      loadCursors(this->p, nextInfo);
      const uint32_t nextFaded = decide(next, nextInfo);
      stream(chunk, info, faded, ordinal);
      if (info.slot >= 0 && info.tokens > 0) ++ordinal;
      chunk = next;
      info = nextInfo;
      faded = nextFaded;
      next = later;
      nextInfo = laterInfo;
    }
    this->openItem(false, -1, 0);
    this->closeItem(false, ItemHeader::make(kEnd, 0, -1, 0, 0, 0, 0, 0), info);
    list.finish(this->lane);
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
    skippingStreamedKernel(const __grid_constant__ UpdateParams p, float logThreshold, int workers) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kTeamThreads = 32 * (Traits::kWarps + 1);
  const SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  const int team = threadIdx.x / kTeamThreads;
  const int warp = threadIdx.x % kTeamThreads / 32, lane = threadIdx.x % 32;
  char* const share = shared + team * layout.teamBytes;
  const Barriers barriers{sharedAddress(share)};
  if (threadIdx.x % kTeamThreads == 0) initBarriers<Traits>(barriers, layout);
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
