// The update with narrow states: a CTA a part (a run of heads of one row and group). Several CTAs share a
// multiprocessor, so that one's start hides behind the others' streams.
#pragma once

#include "flush.cuh"
#include "stream.cuh"
#include "stream_gdn.cuh"

namespace replayssm {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksWanted)
    narrowUpdateKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ NarrowLayout layout) {
  extern __shared__ __align__(128) char shared[];
  static_assert(Traits::kWarps * kMaxNarrowStages * 8 <= kSavedPart, "barriers fit before the part");
  const int partHeads = layout.partHeads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = static_cast<int>(blockIdx.x), groups = Traits::kMostGroups > 1 ? layout.partGroups : 1;
  const int group = static_cast<int>(blockIdx.y) * groups;
  const int first = static_cast<int>(blockIdx.z) * partHeads;
  const uint32_t barriers = sharedAddress(shared) + warp * kMaxNarrowStages * 8;
  if (lane == 0) {
#pragma unroll 1
    for (int s = 0; s < layout.stages; ++s) barrierInit(barriers + 8 * s, 32);
    barrierInitFence();
  }
  __syncwarp();
  waitForPredecessor();
  const int slot = __ldcg(p.slot + row * p.slotStride);
  const int tokens = min(max(__ldcg(p.numTokens + row * p.numTokensStride), 0), p.tokens);
  Part<Traits> part{p,     layout, shared, warp, lane, row, slot, tokens, 0, 0, group, group * p.headsPerGroup + first,
                    min(partHeads, groups * p.headsPerGroup - first), groups, shared};
  // Garbage ids and cursors must do no harm: engine builders time their candidates with uninitialised inputs. One
  // unsigned comparison: an id set to -1 instead costs the float16 kernel a spill.
  if (static_cast<uint32_t>(slot) >= static_cast<uint32_t>(p.slots) || tokens == 0) {
    part.writeZeros();
    return;
  }
  using Stream = std::conditional_t<Traits::kPlainGdn, PlainGdnStream<Traits>, HeadStream<Traits>>;
  const Stream stream{part, barriers};
  const HeadFlush<Traits> flush{part, barriers};
  part.origin = min(max(__ldcg(p.origin + slot), 0), p.ringRows - 1);
  part.pending = min(max(__ldcg(p.pending + slot), 0), p.window);
  if constexpr (Traits::kPlainGdn) {
    loadGroups(part);
  } else {
    part.loadKeys(threadIdx.x);
  }
  part.loadHeads(threadIdx.x);
  const bool flushes = part.flushes();
  if (flushes) {
    if (threadIdx.x == 0) part.save();
    flush.start();
  } else {
    stream.start();
  }
  releaseDependents();
  loadsWaitGroups();
  __syncthreads();
  if constexpr (Traits::kPlainGdn) {
    prepareGroups(part, flushes);
  } else {
    part.multiplyKeys();
    if (!flushes && warp == Traits::kWarps - 1) QueryFragments<Traits>::make(part);
    if constexpr (Traits::kGdn) {
      if (warp == Traits::kWarps - 2) setNorms(part);
    }
    part.appendKeys(threadIdx.x);
  }
  if constexpr (Traits::kGdn) {
    if (flushes) multiplyRecords(part);
    if constexpr (Traits::kRecallsCodes) {
      if (flushes) makeKeyHalves(part);
    }
  }
  part.appendHeads(threadIdx.x);
  __syncthreads();
  if (flushes) {
    if constexpr (Traits::kPlain) setPlainFolds(part);
    if constexpr (Traits::kPlainGdn) solveHeads(part);
    if constexpr (Traits::kOneToken) __syncthreads();
    flush.run();
  } else {
    stream.run();
  }
}

}  // namespace replayssm
