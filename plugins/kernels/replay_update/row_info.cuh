// Where a batch row stands: its slot, its number of tokens, its cursors. Garbage ids and cursors do no harm: engine
// builders time their candidates with uninitialised inputs.
#pragma once

#include "params.h"

namespace replayssm {

struct RowInfo {
  int slot, tokens, origin, pending;
  __device__ bool idle() const { return slot < 0 || tokens <= 0; }
};

// Slot and number of tokens, not clamped yet: that would wait for it. Padding (slot -1) and row -1 have no tokens.
__device__ __forceinline__ RowInfo fetchRow(const UpdateParams& p, int row) {
  RowInfo info{-1, 0, 0, 0};
  if (row < 0) return info;
  info.slot = __ldcg(p.slot + row * p.slotStride);
  if (info.slot >= p.slots) info.slot = -1;
  info.tokens = __ldcg(p.numTokens + row * p.numTokensStride);
  return info;
}

__device__ __forceinline__ int clampedTokens(const UpdateParams& p, const RowInfo& info) {
  return min(max(info.tokens, 0), p.tokens);
}

// Waits for the slot.
__device__ __forceinline__ void fetchCursors(const UpdateParams& p, RowInfo& info) {
  if (info.slot < 0) return;
  info.origin = min(max(__ldcg(p.origin + info.slot), 0), p.ringRows - 1);
  info.pending = min(max(__ldcg(p.pending + info.slot), 0), p.window);
}

// Where a batch of rows stands, looked up at once by a warp: row 32 i + lane of the batch in every lane.
struct RowBatch {
  static constexpr int kWords = 8, kRows = 32 * kWords;
  int slot[kWords];
  uint32_t cursors[kWords];  // tokens, pending, origin: 8, 8, 16 bits

  __device__ void fetch(const UpdateParams& p, int base, int lane) {
    RowInfo info[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int row = base + 32 * i + lane;
      info[i] = fetchRow(p, row < p.rows ? row : -1);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {  // without branches, around which loads would wait for each other
      const int at = max(info[i].slot, 0);
      info[i].origin = __ldcg(p.origin + at);
      info[i].pending = __ldcg(p.pending + at);
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int origin = min(max(info[i].origin, 0), p.ringRows - 1), pending = min(max(info[i].pending, 0), p.window);
      slot[i] = info[i].slot;
      cursors[i] = static_cast<uint32_t>(clampedTokens(p, info[i]) | pending << 8 | origin << 16);
    }
  }

  static __device__ RowInfo unpacked(int slot, uint32_t cursors) {
    return {slot, static_cast<int>(cursors & 255u), static_cast<int>(cursors >> 16), static_cast<int>(cursors >> 8 & 255u)};
  }
  __device__ bool flushes(const UpdateParams& p, int i) const {
    const RowInfo info = unpacked(slot[i], cursors[i]);
    return !info.idle() && info.pending + info.tokens > p.window;
  }

  // A row of the batch for each lane, all lanes together; -1: none.
  __device__ RowInfo at(int row) const {
    RowInfo found{-1, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int rowSlot = __shfl_sync(0xffffffffu, slot[i], row & 31);
      const uint32_t rowCursors = __shfl_sync(0xffffffffu, cursors[i], row & 31);
      if (row >> 5 == i) found = unpacked(rowSlot, rowCursors);
    }
    return found;
  }
};

// The order in which rows are worked on: those that flush first. Where each step flushes a share of the rows, reads of states
// that are written back would else stand among those of others all along the launch, and the memory turn between reading
// and writing. Each lane knows of 32 rows which ones flush; more rows than a warp can know of keep their order, and those of
// one token, of which so few flush that they do no harm.
struct RowOrder {
  uint32_t flushing;  // of the lane's rows
  int before;         // rows that flush, of lanes before
  int first;          // of all: these come first

  static __device__ bool serves(const UpdateParams& p) { return p.tokens > 1 && p.rows <= 32 * 32; }

  // By a whole warp. `batch` keeps the rows, if they are no more than it holds.
  __device__ RowOrder(const UpdateParams& p, int lane, RowBatch& batch) : flushing(0), before(0), first(0) {
    if (!serves(p)) return;
    for (int base = 0; base < p.rows; base += RowBatch::kRows) {
      batch.fetch(p, base, lane);
#pragma unroll
      for (int i = 0; i < RowBatch::kWords; ++i) {
        const uint32_t rows = __ballot_sync(0xffffffffu, batch.flushes(p, i));
        const int word = base / 32 + i;
        if (lane == word) flushing = rows;
        if (lane > word) before += __popc(rows);
        first += __popc(rows);
      }
    }
  }

  // The row at a place of the order; a place for each lane, all lanes together.
  __device__ int row(const UpdateParams& p, int place) const {
    if (first == 0 || first == p.rows) return place;
    const bool flushes = place < first;
    int left = flushes ? place : place - first, at = 0;
    const auto rowsBefore = [&](int of) {
      const int found = __shfl_sync(0xffffffffu, before, of);
      return flushes ? found : 32 * of - found;
    };
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      if (rowsBefore(at + step) <= left) at += step;
    }
    left -= rowsBefore(at);
    const uint32_t word = __shfl_sync(0xffffffffu, flushing, at);
    uint32_t rest = flushes ? word : ~word;
    int bit = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const int below = __popc(rest & ((1u << step) - 1u));
      if (left < below) continue;
      left -= below;
      rest >>= step;
      bit += step;
    }
    return 32 * at + bit;
  }
};

}  // namespace replayssm
