// A team's producer warp: turns the team's share of (row, group part) chunks into a stream of items in shared memory.
//
// All copies are asynchronous. A row's cursors are read one chunk ahead and its slot two, so that neither latency
// stalls the stream. Only records 0..h-1 (ring) and tokens 0..num_tokens-1 (inputs) are ever read.
#pragma once

#include "loads.cuh"

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

  // The index-th chunk of this worker, index rising by one a call; count = 0 behind the end. Lane 0 draws.
  __device__ Chunk next(int index, int lane) const {
    int first, count = p.headsPerGroup;
    if (index < rounds) {
      first = (index * workers + worker) * p.headsPerGroup;
    } else {
      int piece = worker;
      if (index > rounds) {
        if (!draws()) return {0, 0, 0};
        if (lane == 0) piece = workers + static_cast<int>(atomicAdd(p.tickets, 1u));
        piece = __shfl_sync(0xffffffffu, piece, 0);
      }
      if (piece >= pieces) return {0, 0, 0};
      count = p.pieceHeads;
      first = base + piece * count;
    }
    int row = first / p.heads;
    return {row, first - row * p.heads, count};
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

template <class Traits>
struct Producer {
  const UpdateParams& p;
  const SharedLayout layout;
  const Barriers barriers;
  const uint32_t sharedBase;  // of the team's share
  char* const shared;
  const int lane;
  RingCursor at, keysAt;

  __device__ RecordLoader<Traits> loader() const { return {p, layout, lane, 32}; }

  __device__ void loadKeys(const RowInfo& info, int row, int group) {
    barrierWait(barriers.keysEmpty(keysAt.index), keysAt.parity ^ 1);
    loader().keys(info, row, group, sharedBase + layout.keyOffset(keysAt.index));
    loader().queries(info, row, group, sharedBase + layout.keyOffset(keysAt.index));
    loadsArrive(barriers.keysFull(keysAt.index));
    keysAt.advance(layout.keyBuffers);
  }

  // Waits for the stage and starts the state's copy, which needs the slot but not the cursors.
  __device__ void openItem(bool loads, int slot, int head) {
    barrierWait(barriers.empty(at.index), at.parity ^ 1);
    if (lane == 0 && loads) {
      const float* state = p.checkpoint + slot * p.checkpointSlotStride +
                           static_cast<int64_t>(head) * Traits::kHeadDim * Traits::kStateDim;
      barrierExpect(barriers.full(at.index), Traits::kStateBytes);
      bulkLoad(sharedBase + layout.stageOffset(at.index), state, Traits::kStateBytes, barriers.full(at.index));
    }
  }

  // Header and records; every lane arrives when its part has landed.
  __device__ void closeItem(bool loads, const ItemHeader& header, const RowInfo& info) {
    uint32_t full = barriers.full(at.index);
    if (lane == 0) *reinterpret_cast<ItemHeader*>(shared + layout.stageOffset(at.index) + layout.headerOffset) = header;
    __syncwarp();
    if (loads) {
      loader().records(info, header.row, header.head(), sharedBase + layout.stageOffset(at.index));
      loadsArrive(full);
    } else {
      barrierArrive(full);
    }
    at.advance(layout.stages);
  }

  // The items of one chunk. `fresh`: its cursors are not read yet.
  __device__ void stream(const Chunk& chunk, RowInfo& info, bool fresh, int ordinal) {
    bool zero = info.slot < 0 || info.tokens == 0;
    int group = chunk.head / p.headsPerGroup;
#pragma unroll 1
    for (int i = 0; i < chunk.count; ++i) {
      int head = chunk.head + i;
      openItem(!zero, info.slot, head);
      if (fresh && i == 0) loadCursors(p, info);
      uint32_t flags = (zero ? kZero : 0u) | (i == 0 ? kFirst : 0u) | (i + 1 == chunk.count ? kLast : 0u) |
                       (head == group * p.headsPerGroup ? kAppendKeys : 0u);
      const ItemHeader header = ItemHeader::make(flags, chunk.row, info.slot, head, info.origin, info.pending,
                                                 info.tokens, ordinal);
      closeItem(!zero, header, info);
      if (i == 0 && !zero) loadKeys(info, chunk.row, group);
    }
  }

  __device__ void run(int worker, int workers) {
    const ChunkList list(p, worker, workers);
    Chunk chunk = list.next(0, lane);
    RowInfo info = loadRow(p, chunk.count > 0 ? chunk.row : -1);
    Chunk next = list.next(1, lane);
    RowInfo nextInfo = loadRow(p, next.count > 0 ? next.row : -1);
    int ordinal = 0;
#pragma unroll 1
    for (int index = 0; chunk.count > 0; ++index) {
      Chunk later = next.count > 0 ? list.next(index + 2, lane) : Chunk{0, 0, 0};
      RowInfo laterInfo = loadRow(p, later.count > 0 ? later.row : -1);
      loadCursors(p, nextInfo);
      stream(chunk, info, index == 0, ordinal);
      if (info.slot >= 0 && info.tokens > 0) ++ordinal;
      chunk = next;
      info = nextInfo;
      next = later;
      nextInfo = laterInfo;
    }
    openItem(false, -1, 0);
    closeItem(false, ItemHeader::make(kEnd, 0, -1, 0, 0, 0, 0, 0), info);
    list.finish(lane);
    loadsDrain();
  }
};

}  // namespace replayssm
