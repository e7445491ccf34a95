// A team's producer warp: turns the team's share of (row, group part) chunks into a stream of states in shared memory, and
// announces the heads to the recorders, one ahead of its state. One warp's instructions bound what it can send, so it does
// nothing else.
#pragma once

#include "../replay_update/work.cuh"
#include "loads.cuh"

namespace replayssm::weighed {

// Barriers of a team, by 32-bit shared address. full, empty: stages; keysFull, multiplied, keysEmpty: key buffers, their
// products; announced: headers of heads; landed, weighed, released: a head's records and weights in its slot, their use.
struct Barriers {
  uint32_t base;
  __device__ uint32_t at(int index) const { return base + 8 * index; }
  __device__ uint32_t full(int stage) const { return at(stage); }
  __device__ uint32_t empty(int stage) const { return at(kMaxStages + stage); }
  __device__ uint32_t keysFull(int buffer) const { return at(2 * kMaxStages + buffer); }
  __device__ uint32_t keysEmpty(int buffer) const { return at(2 * kMaxStages + kMaxKeyBuffers + buffer); }
  __device__ uint32_t multiplied(int buffer) const { return at(2 * kMaxStages + 2 * kMaxKeyBuffers + buffer); }
  __device__ uint32_t announced(int head) const { return at(2 * kMaxStages + 3 * kMaxKeyBuffers + head); }
  __device__ uint32_t landed(int slot) const { return announced(kHeads + slot); }
  __device__ uint32_t weighed(int slot) const { return announced(kHeads + kMaxSlots + slot); }
  __device__ uint32_t released(int slot) const { return announced(kHeads + 2 * kMaxSlots + slot); }
};
static_assert((2 * kMaxStages + 3 * kMaxKeyBuffers + kHeads + 3 * kMaxSlots) * 8 <= kBarrierBytes, "barriers fit");
static_assert(kBarrierBytes + kMaxStages * 32 + kHeads * 16 <= kControlBytes && sizeof(StageHeader) == 32, "headers fit");

// The heads of the largest chunk there is.
__device__ __forceinline__ int mostHeads(const WorkDeal& deal) {
  return max(deal.rounds > 0 ? deal.roundHeads : 0, deal.pieceHeads);
}

// Key buffers are used from chunk to chunk; heads of idle rows use none.
__device__ __forceinline__ bool usesKeys(const ItemHeader& head, HeaderFlags flag) {
  return head.has(flag) && !head.has(kZero);
}

template <class Traits>
struct Producer {
  const UpdateParams& p;
  const SharedLayout& layout;
  const Barriers barriers;
  const uint32_t sharedBase;  // of the team's share
  char* const shared;
  const int lane;
  RingCursor at, headAt, slotAt, keysAt;
  uint32_t number = 0;  // of the next item

  __device__ uint32_t stage(int index) const { return sharedBase + layout.stageStart + index * Traits::kStateBytes; }

  // Tells the recorders of a head; they fetch its records. Returns where these and the keys will be.
  //
  // HAZARD: consumers wait for the keys of chunks that they have not followed, so a key buffer's last keys must have landed.
  __device__ ItemPlace announce(const ItemHeader& header) {
    if (usesKeys(header, kFirst)) barrierWait(barriers.keysFull(keysAt.index), keysAt.parity ^ 1);
    if (lane == 0) {
      *reinterpret_cast<ItemHeader*>(shared + layout.headPlace(headAt.index)) = header;
      barrierArrive(barriers.announced(headAt.index));
    }
    const ItemPlace place = ItemPlace::make(slotAt.index, slotAt.parity, keysAt.index, keysAt.parity);
    headAt.advance(kHeads);
    slotAt.advance(layout.slots);
    if (usesKeys(header, kLast)) keysAt.advance(layout.keyBuffers);
    return place;
  }

  __device__ const float* state(int slot, int head, int part) const {
    return p.checkpoint + slot * p.checkpointSlotStride +
           (head * Traits::kHeadDim + part * Traits::kRows) * static_cast<int64_t>(Traits::kStateDim);
  }

  // Of the walk's head, were its first item also its last one.
  __device__ ItemHeader headerOf(const HeadWalk& walk) const {
    if (walk.ended()) return ItemHeader::make(kEnd, 0, -1, 0, 0, 0, 0, 0);
    const uint32_t flags = (walk.zero() ? kZero : 0u) | (walk.first() ? kFirst : 0u) | (walk.last() ? kLast : 0u) |
                           (walk.first() && walk.chunk.leads ? kAppendKeys : 0u);
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
  __device__ void sendState(const ItemHeader& header, ItemPlace place) {
    barrierWait(barriers.empty(at.index), at.parity ^ 1);
    if (lane == 0) {
      const uint32_t full = barriers.full(at.index);
      *reinterpret_cast<StageHeader*>(shared + layout.headerPlace(at.index)) = {header, number, place};
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
    ++number;
  }

  __device__ void run(int worker, int workers) {
    HeadWalk walk(p, worker, workers, lane);
    ItemHeader header = headerOf(walk);
    ItemPlace place = announce(header), nextPlace{};
    if (lane == 0) prefetchRecords(walk);
    int ahead = 0;  // heads sent while the predecessor may run
#pragma unroll 1
    while (!walk.ended()) {
      ItemHeader next{};
#pragma unroll
      for (int part = 0; part < Traits::kParts; ++part) {
        ItemHeader item = header;
        if (part > 0) item.drop(kFirst);
        if (part + 1 < Traits::kParts) item.drop(kLast);
        item.place += static_cast<uint32_t>(part) << 24;
        sendState(item, place);
        if (part == 0) {
          if (walk.fresh && (!p.settled || walk.last() || ++ahead * Traits::kParts >= layout.stages)) {
            if (p.settled) waitForPredecessor();  // the counter of chunks is its
            walk.lookAhead();
          }
          walk.advance();
          next = headerOf(walk);
          nextPlace = announce(next);
        }
      }
      header = next;
      place = nextPlace;
    }
#pragma unroll 1
    for (int set = 0; set < Traits::kSets; ++set) sendState(header, place);
    walk.list.finish(lane);
  }
};

}  // namespace replayssm::weighed
