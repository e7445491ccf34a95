// The conventional step and the recovery step of both families: a warp holds some rows of one head's state in registers,
// applies tokens one after another and writes the rows where the step says. `Layout` says which lane holds what.
#pragma once

#include "narrow_rows.cuh"
#include "wide_rows.cuh"

namespace replayssm {

constexpr int kMaxThreads = 256;

template <class Layout>
__device__ void storeZeros(const Layout& rows, int first, int end) {
  const typename Layout::Outputs zeros = {};
  for (int token = first; token < end; ++token) rows.store(token, zeros);
}

// While the predecessor runs: the rows that the warp will probably read, into the L2. The slot may still change, so it is
// a hint and nothing else is taken from it.
template <class Rows>
__device__ void prefetchRows(const ConventionalParams& p, const Rows& block) {
  const int slot = __ldcg(p.slot + block.row * p.slotStride);
  if (block.lane != 0 || p.entry != nullptr || static_cast<uint32_t>(slot) >= static_cast<uint32_t>(p.slots)) return;
  bulkPrefetch(block.state(p.state, slot), Rows::kRows * kConventionalStateDim * 4);
}

// kSingle: T = 1, which needs no registers for a token ahead.
template <template <class> class LayoutOf, class Rows, bool kSingle>
__global__ void __launch_bounds__(kMaxThreads) conventionalKernel(const __grid_constant__ ConventionalParams p) {
  using Layout = LayoutOf<Rows>;
  const Rows block = Rows::of(p);
  if (block.row < p.rows && p.prefetches) prefetchRows(p, block);
  if (p.settled) {
    releaseDependents();
  } else {
    waitForPredecessor();
  }
  if (block.row >= p.rows) return;
  const Layout rows{block};
  const auto [slot, tokens] = RowTokens::of(p, block.row);
  if (tokens > 0) {
    int entry = p.entry == nullptr ? 0 : __ldg(p.entry + slot);
    float* const state = rows.place(p.state, slot);
    typename Layout::Rows s;
    rows.read(s, state + entry * p.entryStride);
    if (p.settled) waitForPredecessor();
    auto next = rows.template load<true>(p.inputs, 0);
    const float a = block.rate(), skip = block.skip();
    if (!p.settled) releaseDependents();  // their start should not delay these loads
#pragma unroll 1
    for (int token = 0; token < (kSingle ? 1 : tokens); ++token) {
      const auto in = next;
      if (!kSingle && token + 1 < tokens) next = rows.template load<true>(p.inputs, token + 1);
      typename Layout::Outputs out;
      rows.template apply<true>(s, out, in, a, skip);
      entry = entry + 1 < p.entries ? entry + 1 : 0;
      rows.write(state + entry * p.entryStride, s);
      rows.store(token, out);
    }
  }
  if (p.settled && tokens == 0) waitForPredecessor();
  storeZeros(rows, tokens, kSingle ? 1 : p.tokens);
}

// From `source`: cached tokens without outputs, the state after them to `recovered`, the step's tokens, the state after
// those to `end`.
template <template <class> class LayoutOf, class Rows>
__global__ void __launch_bounds__(kMaxThreads) recoveryKernel(const __grid_constant__ RecoveryParams p) {
  using Layout = LayoutOf<Rows>;
  waitForPredecessor();
  const Rows block = Rows::of(p);
  if (block.row >= p.rows) return;
  const Layout rows{block};
  const auto [slot, tokens] = RowTokens::of(p, block.row);
  if (slot >= 0) {
    typename Layout::Rows s;
    typename Layout::Outputs out;
    rows.read(s, rows.place(p.source, slot));
    const float a = block.rate(), skip = block.skip();
    const int replayed =
        p.maxReplayed == 0 ? 0 : min(max(__ldg(p.replayed + block.row * p.replayedStride), 0), p.maxReplayed);
#pragma unroll 1
    for (int token = 0; token < replayed; ++token) {
      rows.template apply<false>(s, out, rows.template load<false>(p.cached, token), a, skip);
    }
    if (p.recovered.data != nullptr) rows.write(rows.place(p.recovered, slot), s);
#pragma unroll 1
    for (int token = 0; token < tokens; ++token) {
      rows.template apply<true>(s, out, rows.template load<true>(p.inputs, token), a, skip);
      rows.store(token, out);
    }
    if (p.end.data != nullptr) rows.write(rows.place(p.end, slot), s);
  }
  storeZeros(rows, tokens, p.tokens);
}

}  // namespace replayssm
