// A team's producer warp: turns the team's share of (row, group part) chunks into a stream of items in shared memory.
//
// All copies are asynchronous. A row's cursors are read one chunk ahead and its slot two, so that neither latency
// stalls the stream. Only records 0..h-1 (ring) and tokens 0..num_tokens-1 (inputs) are ever read.
#pragma once

#include "../common/mbarrier.cuh"
#include "params.h"
#include "traits.cuh"

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

// A worker's share of all rows * heads: whole groups, dealt out in turn so that rows that flush are spread, then its
// part of what is left, so that no worker has more than one head more than another.
struct ChunkList {
  int heads, headsPerGroup, worker, workers;
  int rounds;     // whole groups of each worker
  int from, end;  // its part of the rest, as row * heads + head

  __device__ ChunkList(const UpdateParams& p, int w, int n)
      : heads(p.heads), headsPerGroup(p.headsPerGroup), worker(w), workers(n) {
    int groups = p.rows * p.groups;
    rounds = groups / workers;
    int base = rounds * workers * headsPerGroup;
    int rest = groups * headsPerGroup - base;  // less than workers * headsPerGroup
    from = base + static_cast<int>(static_cast<unsigned>(rest) * worker / workers);
    end = worker < workers ? base + static_cast<int>(static_cast<unsigned>(rest) * (worker + 1) / workers) : from;
  }

  // count = 0 behind the end.
  __device__ Chunk at(int index) const {
    int first = (index * workers + worker) * headsPerGroup;
    int last = first + headsPerGroup;
    if (index >= rounds) {
      int group = from / headsPerGroup + (index - rounds);
      first = max(from, group * headsPerGroup);
      last = min(end, (group + 1) * headsPerGroup);
    }
    if (first >= last || worker >= workers) return {0, 0, 0};
    int row = first / heads;
    return {row, first - row * heads, last - first};
  }
};

struct RowInfo {
  int slot, tokens, origin, pending;
};

// Slot and token count of a chunk's row; padding (slot -1) has no tokens.
__device__ __forceinline__ RowInfo loadRow(const UpdateParams& p, const Chunk& chunk) {
  RowInfo info{-1, 0, 0, 0};
  if (chunk.count == 0) return info;
  info.slot = __ldcg(p.slot + chunk.row * p.slotStride);
  info.tokens = min(max(__ldcg(p.numTokens + chunk.row * p.numTokensStride), 0), p.tokens);
  return info;
}

__device__ __forceinline__ void loadCursors(const UpdateParams& p, RowInfo& info) {
  if (info.slot < 0) return;
  info.origin = __ldcg(p.origin + info.slot);
  info.pending = __ldcg(p.pending + info.slot);
}

template <class Traits>
struct Producer {
  const UpdateParams& p;
  const SharedLayout layout;
  const Barriers barriers;
  const uint32_t sharedBase;  // of the team's share
  char* const shared;
  const int lane;
  RingCursor at, keysAt;

  __device__ int ringRow(const RowInfo& row, int index) const {
    int r = row.origin + index;
    return r < p.ringRows ? r : r - p.ringRows;
  }

  // Keys of the committed records and of this step, then the queries; 16-byte pieces, neighbouring lanes side by side.
  __device__ void loadKeys(const RowInfo& info, int row, int group) {
    using Act = typename Traits::Act;
    constexpr int kPieces = Traits::kStateDim / 8;
    uint32_t target = sharedBase + layout.keyOffset(keysAt.index);
    barrierWait(barriers.keysEmpty(keysAt.index), keysAt.parity ^ 1);
    int total = info.pending + info.tokens;
    const Act* ring = static_cast<const Act*>(p.ringKey) + info.slot * p.ringKeySlotStride +
                      static_cast<int64_t>(group) * p.ringRows * Traits::kStateDim;
    const Act* keys = static_cast<const Act*>(p.k.data) + row * p.k.rowStride + group * p.k.headStride;
    const Act* queries = static_cast<const Act*>(p.q.data) + row * p.q.rowStride + group * p.q.headStride;
#pragma unroll 1
    for (int i = lane; i < (total + info.tokens) * kPieces; i += 32) {
      int j = i / kPieces, piece = i % kPieces;
      const Act* source = j < info.pending ? ring + ringRow(info, j) * Traits::kStateDim
                          : j < total      ? keys + (j - info.pending) * p.k.tokenStride
                                           : queries + (j - total) * p.q.tokenStride;
      uint32_t offset = j < total ? j * Traits::kKeyPitch : layout.queryOffset + (j - total) * Traits::kKeyPitch;
      pieceLoad(target + offset + piece * 16, source + piece * 8);
    }
    loadsArrive(barriers.keysFull(keysAt.index));
    keysAt.advance(layout.keyBuffers);
  }

  // Values, dt and the head's scalars of an item.
  __device__ void loadRecords(const RowInfo& info, int row, int head, uint32_t stage) {
    using Act = typename Traits::Act;
    constexpr int kPieces = Traits::kHeadDim / 8;
    int total = info.pending + info.tokens;
    int64_t ringHead = static_cast<int64_t>(head) * p.ringRows;
    const Act* ringValues = static_cast<const Act*>(p.ringValue) + info.slot * p.ringValueSlotStride +
                            ringHead * Traits::kHeadDim;
    const Act* values = static_cast<const Act*>(p.value.data) + row * p.value.rowStride + head * p.value.headStride;
    const float* ringDt = p.ringDt + info.slot * p.ringDtSlotStride + ringHead;
    const float* dt = static_cast<const float*>(p.dt.data) + row * p.dt.rowStride + head * p.dt.headStride;
#pragma unroll 1
    for (int i = lane; i < total * kPieces; i += 32) {
      int j = i / kPieces, piece = i % kPieces;
      int token = j - info.pending;
      const Act* value = token < 0 ? ringValues + ringRow(info, j) * Traits::kHeadDim : values + token * p.value.tokenStride;
      pieceLoad(stage + layout.valueOffset + j * Traits::kValuePitch + piece * 16, value + piece * 8);
    }
#pragma unroll 1
    for (int j = lane; j < total; j += 32) {
      int token = j - info.pending;
      wordLoad(stage + layout.dtOffset + j * 4, token < 0 ? ringDt + ringRow(info, j) : dt + token * p.dt.tokenStride);
    }
    if (lane == 0) wordLoad(stage + layout.scalarOffset, p.a + head);
    if (lane == 1 && p.skip != nullptr) wordLoad(stage + layout.scalarOffset + 4, p.skip + head);
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
      loadRecords(info, header.row, header.head(), sharedBase + layout.stageOffset(at.index));
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
      closeItem(!zero, ItemHeader::make(flags, chunk.row, info.slot, head, info.origin, info.pending, info.tokens, ordinal),
                info);
      if (i == 0 && !zero) loadKeys(info, chunk.row, group);
    }
  }

  __device__ void run(int worker, int workers) {
    const ChunkList list(p, worker, workers);
    Chunk chunk = list.at(0), next = list.at(1);
    RowInfo info = loadRow(p, chunk);
    RowInfo nextInfo = loadRow(p, next);
    int ordinal = 0;
#pragma unroll 1
    for (int index = 0; chunk.count > 0; ++index) {
      Chunk later = list.at(index + 2);
      RowInfo laterInfo = loadRow(p, later);
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
    loadsDrain();
  }
};

}  // namespace replayssm
