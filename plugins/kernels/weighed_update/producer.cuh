// A team's producer warp: turns the team's share of (row, group part) chunks into a stream of states in shared memory, and
// announces the heads to the recorders, one ahead of its state. One warp's instructions bound what it can send, so it does
// nothing else.
#pragma once

#include "loads.cuh"

namespace replayssm::weighed {

// Barriers of a team, by 32-bit shared address. full, empty: stages; keysFull, keysEmpty: key buffers; announced, landed,
// weighed: header, records and weights of a head's slot.
struct Barriers {
  static constexpr int kSlots = kMaxStages + 1;
  uint32_t base;
  __device__ uint32_t at(int index) const { return base + 8 * index; }
  __device__ uint32_t full(int stage) const { return at(stage); }
  __device__ uint32_t empty(int stage) const { return at(kMaxStages + stage); }
  __device__ uint32_t keysFull(int buffer) const { return at(2 * kMaxStages + buffer); }
  __device__ uint32_t keysEmpty(int buffer) const { return at(2 * kMaxStages + kMaxKeyBuffers + buffer); }
  __device__ uint32_t announced(int slot) const { return at(2 * kMaxStages + 2 * kMaxKeyBuffers + slot); }
  __device__ uint32_t landed(int slot) const { return announced(kSlots + slot); }
  __device__ uint32_t weighed(int slot) const { return announced(2 * kSlots + slot); }
};
static_assert((2 * kMaxStages + 2 * kMaxKeyBuffers + 3 * Barriers::kSlots) * 8 <= kBarrierBytes, "barriers fit");

// A position in a ring of buffers, with the parity of its current use.
struct RingCursor {
  int index = 0;
  uint32_t parity = 0;
  __device__ void advance(int size) {
    if (++index == size) {
      index = 0;
      parity ^= 1;
    }
  }
};

// A run of heads of one row and group: what shares one load of keys.
struct Chunk {
  int row, head, count;
  bool leads;  // begins with its group's first head
};

// Deals rows * heads out to workers. Whole groups first, in turn, so that rows that flush are spread. Multiprocessors
// do not all get the same bandwidth, so the rest goes in small pieces to whoever is ready: a worker's first piece is
// its own number, later ones are drawn from a counter in the workspace.
struct ChunkList {
  const UpdateParams& p;
  int worker, workers, rounds, base, pieces;

  __device__ ChunkList(const UpdateParams& params, int w, int n) : p(params), worker(w), workers(n) {
    int groups = p.rows * p.groups;
    rounds = max(groups / workers - 1, 0);
    base = rounds * workers * p.headsPerGroup;
    pieces = (groups * p.headsPerGroup - base) / p.pieceHeads;
  }

  __device__ bool draws() const { return pieces > workers; }

  // A ticket for a later piece, in lane 0; asked for long before it is used, since its way to the memory is long.
  __device__ int draw(int lane) const {
    return draws() && lane == 0 ? workers + static_cast<int>(atomicAdd(p.tickets, 1u)) : 0;
  }

  // The index-th chunk of this worker; count = 0 behind the end. A chunk behind the first piece uses up a ticket.
  __device__ Chunk at(int index, int ticket) const {
    int first, count = p.headsPerGroup;
    bool leads = true;
    if (index < rounds) {
      first = (index * workers + worker) * p.headsPerGroup;
    } else {
      if (index > rounds && !draws()) return {0, 0, 0, false};
      const int piece = index == rounds ? worker : __shfl_sync(0xffffffffu, ticket, 0);
      if (piece >= pieces) return {0, 0, 0, false};
      count = p.pieceHeads;
      first = base + piece * count;
      leads = first % p.headsPerGroup == 0;
    }
    int row = first / p.heads;
    return {row, first - row * p.heads, count, leads};
  }

  // The last worker to finish leaves the counters at zero for the next launch.
  __device__ void finish(int lane) const {
    if (lane != 0 || !draws()) return;
    __threadfence();
    if (atomicAdd(p.tickets + 1, 1u) == static_cast<unsigned>(workers) - 1) {
      p.tickets[0] = 0;
      p.tickets[1] = 0;
    }
  }
};

// The heads of a worker in order. Slots are read two chunks ahead and cursors one, so that neither latency shows.
struct HeadWalk {
  const ChunkList list;
  const UpdateParams& p;
  const int lane;
  Chunk chunk, next{0, 0, 0, false}, later{0, 0, 0, false};
  RowInfo info, nextInfo{-1, 0, 0, 0}, laterInfo{-1, 0, 0, 0};
  int index = 0, done = 0;  // chunks begun before this one, heads of it that are passed
  int ticket = 0;
  bool fresh = true;  // whether only the first chunk is known

  __device__ HeadWalk(const UpdateParams& params, int worker, int workers, int l)
      : list(params, worker, workers), p(params), lane(l), chunk(list.at(0, 0)) {
    info = fetchRow(p, chunk.count > 0 ? chunk.row : -1);
  }

  __device__ bool ended() const { return chunk.count == 0; }
  __device__ bool zero() const { return info.idle(); }

  // Of the head's first item, were it also its last one.
  __device__ ItemHeader header() const {
    if (ended()) return ItemHeader::make(kEnd, 0, -1, 0, 0, 0, 0, 0);
    const uint32_t flags = (zero() ? kZero : 0u) | (done == 0 ? kFirst : 0u) | (done + 1 == chunk.count ? kLast : 0u) |
                           (done == 0 && chunk.leads ? kAppendKeys : 0u) | kHeadDone;
    return ItemHeader::make(flags, chunk.row, info.slot, chunk.head + done, 0, info.origin, info.pending,
                            min(max(info.tokens, 0), p.tokens));
  }

  __device__ void fetchLater(int at) {
    later = list.at(at, ticket);
    if (at > list.rounds) ticket = list.draw(lane);
    laterInfo = fetchRow(p, later.count > 0 ? later.row : -1);
  }

  // The chunks behind the first one; called once, when the first one's copies are on their way.
  __device__ void lookAhead() {
    fresh = false;
    ticket = list.draw(lane);
    fetchLater(1);
    next = later;
    nextInfo = laterInfo;
    if (next.count > 0) fetchLater(2);
    fetchCursors(p, nextInfo);
  }

  __device__ void advance() {
    if (++done < chunk.count) return;
    done = 0;
    ++index;
    chunk = next;
    info = nextInfo;
    next = later;
    nextInfo = laterInfo;
    if (next.count > 0) fetchLater(index + 2);
    fetchCursors(p, nextInfo);
  }
};

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

  // The first states need the slot only: fills the stages while the cursors are on their way. Returns how many it sent.
  __device__ int sendFirst(const HeadWalk& walk) {
    if (walk.ended() || walk.zero()) return 0;
    const int count = min(layout.stages, walk.chunk.count * Traits::kParts);
    for (int i = 0; i < count && lane == 0; ++i) {
      barrierExpect(barriers.full(i), Traits::kStateBytes);
      bulkLoad(stage(i),
               state(walk.info.slot, walk.chunk.head + i / Traits::kParts, i % Traits::kParts), Traits::kStateBytes,
               barriers.full(i));
    }
    return count;
  }

  // Waits for a stage, then one lane writes the header and starts the state's copy unless it was sent before.
  __device__ void sendState(const ItemHeader& header, bool sent) {
    barrierWait(barriers.empty(at.index), at.parity ^ 1);
    if (lane == 0) {
      const uint32_t full = barriers.full(at.index);
      *reinterpret_cast<ItemHeader*>(shared + layout.headerPlace(at.index)) = header;
      if (sent || header.has(kZero) || header.has(kEnd)) {
        barrierArrive(full);
      } else {
        barrierArriveExpect(full, Traits::kStateBytes);
        bulkLoad(stage(at.index), state(header.slot, header.head(), header.part()),
                 Traits::kStateBytes, full);
      }
    }
    at.advance(layout.stages);
  }

  __device__ void run(int worker, int workers) {
    HeadWalk walk(p, worker, workers, lane);
    int sent = sendFirst(walk);  // items that are on their way already
    fetchCursors(p, walk.info);
    ItemHeader header = walk.header();
    announce(header);
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
        sendState(item, sent > 0);
        --sent;
        if (part == 0) {
          if (walk.fresh) walk.lookAhead();
          walk.advance();
          next = walk.header();
          announce(next);
        }
      }
      header = next;
    }
    sendState(header, false);
    walk.list.finish(lane);
  }
};

}  // namespace replayssm::weighed
