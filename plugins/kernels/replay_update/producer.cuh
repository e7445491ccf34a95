// A team's producer warp: turns the team's share of (row, group part) chunks into a stream of items in shared memory.
//
// All copies are asynchronous. Only records 0..h-1 (ring) and tokens 0..num_tokens-1 (inputs) are ever read.
#pragma once

#include "loads.cuh"
#include "work.cuh"

namespace replayssm {

// Barriers of a team, by 32-bit shared address.
struct Barriers {
  uint32_t base;
  __device__ uint32_t full(int stage) const { return base + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return base + 8 * (kMaxStages + stage); }
  __device__ uint32_t keysFull(int buffer) const { return base + 8 * (2 * kMaxStages + buffer); }
  __device__ uint32_t keysEmpty(int buffer) const { return base + 8 * (2 * kMaxStages + 2 + buffer); }
};
static_assert((2 * kMaxStages + 4) * 8 <= kBarrierBytes, "barriers fit their area");

template <class Traits>
struct Producer {
  const UpdateParams& p;
  const SharedLayout& layout;
  const Barriers barriers;
  const uint32_t sharedBase;  // of the team's share
  char* const shared;
  const int lane;
  RingCursor at, keysAt;

  __device__ RecordLoader<Traits> loader() const { return {p, layout, lane, 32}; }

  __device__ void loadKeys(const RowInfo& info, int row, int group) {
    barrierWait(barriers.keysEmpty(keysAt.index), keysAt.parity ^ 1);
    const uint32_t target = sharedBase + layout.keyOffset(keysAt.index), full = barriers.keysFull(keysAt.index);
    if (lane == 0) loader().bulkKeys(info, group, target, full);
    loader().tokenKeys(info, row, group, target);
    loader().queries(info, row, group, target);
    loadsArrive(full);
    keysAt.advance(layout.keyBuffers);
  }

  // Starts a state's copy into a free stage; what is written back soon stays in the L2. One thread calls it.
  __device__ void loadState(int stage, int slot, int head, bool flushes) const {
    const float* state = p.checkpoint + slot * p.checkpointSlotStride +
                         static_cast<int64_t>(head) * Traits::kHeadDim * Traits::kStateDim;
    const uint32_t target = sharedBase + layout.stageOffset(stage), full = barriers.full(stage);
    barrierExpect(full, Traits::kStateBytes);
    if (flushes) {
      bulkLoadAgain(target, state, Traits::kStateBytes, full);
    } else {
      bulkLoadOnce(target, state, Traits::kStateBytes, full);
    }
  }

  // A lane for each of the first heads: its records into the L2, then the states behind the first one, which is on its way;
  // records behind those would have to wait. Returns how many states are on their way.
  __device__ int sendFirst(const HeadWalk& walk) const {
    if (walk.ended() || walk.zero()) return 0;
    const RowInfo& info = walk.info;
    const int count = min(layout.stages, walk.chunk.count), head = walk.chunk.head + lane;
    const int straight = min(info.pending, p.ringRows - info.origin);
    if (lane < count && straight > 0) {
      if (lane == 0) {
        bulkPrefetch(loader().ringKeys(info, head / p.headsPerGroup) + info.origin * Traits::kStateDim,
                     straight * Traits::kStateDim * 2);
      }
      bulkPrefetch(loader().ringValues(info, head) + info.origin * Traits::kHeadDim, straight * Traits::kHeadDim * 2);
      prefetchLine(loader().ringDt(info, head));
    }
    __syncwarp();
    if (lane > 0 && lane < count) loadState(lane, info.slot, head, info.pending + clampedTokens(p, info) > p.window);
    return count;
  }

  // Header and records; every lane arrives when its part has landed.
  __device__ void sendRecords(bool loads, const ItemHeader& header, const RowInfo& info) {
    uint32_t full = barriers.full(at.index);
    if (lane == 0) *reinterpret_cast<ItemHeader*>(shared + layout.stageOffset(at.index) + layout.headerOffset) = header;
    __syncwarp();
    if (loads) {
      const uint32_t stage = sharedBase + layout.stageOffset(at.index);
      if (lane == 0) loader().bulkValues(info, header.head(), stage, full);
      loader().tokenValues(info, header.row, header.head(), stage);
      loader().numbers(info, header.row, header.head(), stage);
      loadsArrive(full);
    } else {
      barrierArrive(full);
    }
  }

  // The walk's head, with its state unless that is on its way already or not wanted, and more flags than its place gives;
  // `ordinal` of its chunk among those with tokens.
  __device__ void sendItem(const HeadWalk& walk, bool withState, uint32_t more, int ordinal) {
    const bool loads = !walk.zero();
    RowInfo info = walk.info;
    info.tokens = clampedTokens(p, info);
    const int row = walk.chunk.row, head = walk.head();
    const uint32_t flags = more | (loads ? 0u : kZero) | (walk.first() ? kFirst : 0u) | (walk.last() ? kLast : 0u) |
                           (walk.first() && walk.chunk.leads ? kAppendKeys : 0u);
    barrierWait(barriers.empty(at.index), at.parity ^ 1);
    if (lane == 0 && loads && withState) loadState(at.index, info.slot, head, info.pending + info.tokens > p.window);
    __syncwarp();
    sendRecords(loads, ItemHeader::make(flags, row, info.slot, head, ordinal, info.origin, info.pending, info.tokens),
                info);
    if (walk.first() && loads) loadKeys(info, row, head / p.headsPerGroup);
    at.advance(layout.stages);
  }

  __device__ void sendEnd() {
    barrierWait(barriers.empty(at.index), at.parity ^ 1);
    sendRecords(false, ItemHeader::make(kEnd, 0, -1, 0, 0, 0, 0, 0), RowInfo{});
  }

  __device__ void run(int worker, int workers) {
    // One state of a team goes ahead of the cursors, whether it is flushed or not; more would keep the records waiting.
    HeadWalk walk(p, worker, workers, lane, [&](const Chunk& chunk, const RowInfo& info) {
      if (lane == 0 && chunk.count > 0 && !info.idle()) loadState(0, info.slot, chunk.head, false);
    });
    int sent = sendFirst(walk);  // states that are on their way
    if (p.settled) waitForPredecessor();  // inputs, outputs and the counter of chunks are its
    int ordinal = 0;
#pragma unroll 1
    while (!walk.ended()) {
      sendItem(walk, sent <= 0, 0u, ordinal);
      --sent;
      if (walk.last() && !walk.zero()) ++ordinal;
      if (walk.fresh) walk.lookAhead();
      walk.advance();
    }
    sendEnd();
    walk.list.finish(lane);
    loadsDrain();
  }
};

}  // namespace replayssm
