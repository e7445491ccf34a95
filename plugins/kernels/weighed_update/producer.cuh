// A team's producer warp: turns the team's share of (row, group part) chunks into a stream of states in shared memory, and
// announces the heads to the recorders, one ahead of its state. One warp's instructions bound what it can send, so it does
// nothing else.
#pragma once

#include "../replay_update/work.cuh"
#include "loads.cuh"

namespace replayssm::weighed {

// Barriers of a team, by 32-bit shared address. full, empty: stages; keysFull, multiplied, keysEmpty: key buffers, their
// products; announced, landed, weighed: header, records and weights of a head's slot.
struct Barriers {
  static constexpr int kSlots = kMaxStages + 1;
  uint32_t base;
  __device__ uint32_t at(int index) const { return base + 8 * index; }
  __device__ uint32_t full(int stage) const { return at(stage); }
  __device__ uint32_t empty(int stage) const { return at(kMaxStages + stage); }
  __device__ uint32_t keysFull(int buffer) const { return at(2 * kMaxStages + buffer); }
  __device__ uint32_t keysEmpty(int buffer) const { return at(2 * kMaxStages + kMaxKeyBuffers + buffer); }
  __device__ uint32_t multiplied(int buffer) const { return at(2 * kMaxStages + 2 * kMaxKeyBuffers + buffer); }
  __device__ uint32_t announced(int slot) const { return at(2 * kMaxStages + 3 * kMaxKeyBuffers + slot); }
  __device__ uint32_t landed(int slot) const { return announced(kSlots + slot); }
  __device__ uint32_t weighed(int slot) const { return announced(2 * kSlots + slot); }
};
static_assert((2 * kMaxStages + 3 * kMaxKeyBuffers + 3 * Barriers::kSlots) * 8 <= kBarrierBytes, "barriers fit");

template <class Traits>
struct Producer {
  const UpdateParams& p;
  const SharedLayout& layout;
  const Barriers barriers;
  const uint32_t sharedBase;  // of the team's share
  char* const shared;
  const int lane;
  RingCursor at, slotAt;

  __device__ char* slot(int index) const { return shared + layout.slotStart + index * layout.slotBytes; }
  __device__ uint32_t stage(int index) const { return sharedBase + layout.stageStart + index * Traits::kStateBytes; }

  // Tells the recorders of a head; they fetch its records.
  __device__ void announce(const ItemHeader& header) {
    if (lane == 0) {
      *reinterpret_cast<ItemHeader*>(slot(slotAt.index) + layout.slotHeaderOffset) = header;
      barrierArrive(barriers.announced(slotAt.index));
    }
    slotAt.advance(layout.slots);
  }

  __device__ const float* state(int slot, int head, int part) const {
    return p.checkpoint + slot * p.checkpointSlotStride +
           (head * Traits::kHeadDim + part * Traits::kRows) * static_cast<int64_t>(Traits::kStateDim);
  }

  // Of the walk's head, were its first item also its last one.
  __device__ ItemHeader headerOf(const HeadWalk& walk) const {
    if (walk.ended()) return ItemHeader::make(kEnd, 0, -1, 0, 0, 0, 0, 0);
    const uint32_t flags = (walk.zero() ? kZero : 0u) | (walk.first() ? kFirst : 0u) | (walk.last() ? kLast : 0u) |
                           (walk.first() && walk.chunk.leads ? kAppendKeys : 0u) | kHeadDone;
    return ItemHeader::make(flags, walk.chunk.row, walk.info.slot, walk.head(), 0, walk.info.origin, walk.info.pending,
                            clampedTokens(p, walk.info));
  }

  // The first head's records, before any state, behind which they would have to wait. One thread calls it.
  __device__ void prefetchRecords(const HeadWalk& walk) const {
    const RowInfo& info = walk.info;
    if (walk.ended() || info.idle() || info.pending == 0) return;
    const RecordLoader<Traits> loader{p, layout, 0, 1};
    const int straight = min(info.pending, p.ringRows - info.origin);
    bulkPrefetch(loader.ringKeys(info, walk.head() / p.headsPerGroup) + info.origin * Traits::kStateDim,
                 straight * Traits::kKeyPitch);
    bulkPrefetch(loader.ringValues(info, walk.head()) + info.origin * Traits::kHeadDim, straight * Traits::kValuePitch);
  }

  // Waits for a stage, then one lane writes the header and starts the state's copy.
  __device__ void sendState(const ItemHeader& header) {
    barrierWait(barriers.empty(at.index), at.parity ^ 1);
    if (lane == 0) {
      const uint32_t full = barriers.full(at.index);
      *reinterpret_cast<ItemHeader*>(shared + layout.headerPlace(at.index)) = header;
      if (header.has(kZero) || header.has(kEnd)) {
        barrierArrive(full);
      } else {
        barrierArriveExpect(full, Traits::kStateBytes);
        const float* from = state(header.slot, header.head(), header.ordinal());
        if (header.pending() + header.tokens() > p.window) {
          bulkLoadAgain(stage(at.index), from, Traits::kStateBytes, full);
        } else {
          bulkLoadOnce(stage(at.index), from, Traits::kStateBytes, full);
        }
      }
    }
    at.advance(layout.stages);
  }

  __device__ void run(int worker, int workers) {
    HeadWalk walk(p, worker, workers, lane);
    ItemHeader header = headerOf(walk);
    announce(header);
    if (lane == 0) prefetchRecords(walk);
    int ahead = 0;  // heads sent while the predecessor may run
#pragma unroll 1
    while (!walk.ended()) {
      ItemHeader next{};
#pragma unroll
      for (int part = 0; part < Traits::kParts; ++part) {
        ItemHeader item = header;
        if (part > 0) item.drop(kFirst);
        if (part + 1 < Traits::kParts) {
          item.drop(kLast);
          item.drop(kHeadDone);
        }
        item.place += static_cast<uint32_t>(part) << 24;
        sendState(item);
        if (part == 0) {
          if (walk.fresh && (!p.settled || walk.last() || ++ahead * Traits::kParts >= layout.stages)) {
            if (p.settled) waitForPredecessor();  // the counter of chunks is its
            walk.lookAhead();
          }
          walk.advance();
          next = headerOf(walk);
          announce(next);
        }
      }
      header = next;
    }
    sendState(header);
    walk.list.finish(lane);
  }
};

}  // namespace replayssm::weighed
