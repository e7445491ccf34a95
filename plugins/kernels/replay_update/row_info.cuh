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

}  // namespace replayssm
