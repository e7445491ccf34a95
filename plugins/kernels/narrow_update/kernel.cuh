// The update with narrow states: a CTA a part (a run of heads of one row and group), but for plain decoding of Mamba-2
// (resident.cuh). Several CTAs share a multiprocessor, so that one's start hides behind the others' streams.
#pragma once

#include "resident.cuh"
#include "stream.cuh"

namespace replayssm {

template <class Traits>
__device__ __forceinline__ void updatePart(const UpdateParams& p, const NarrowLayout& layout, char* shared) {
  static_assert(Traits::kWarps * kMaxNarrowStages * 8 <= kSavedPart, "barriers fit before the part");
  const int partHeads = layout.partHeads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = static_cast<int>(blockIdx.x), group = static_cast<int>(blockIdx.y);
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
                    min(partHeads, p.headsPerGroup - first), 1, shared};
  // Garbage ids and cursors must do no harm: engine builders time their candidates with uninitialised inputs. One
  // unsigned comparison: an id set to -1 instead costs the float16 kernel a spill.
  if (static_cast<uint32_t>(slot) >= static_cast<uint32_t>(p.slots) || tokens == 0) {
    part.writeZeros();
    return;
  }
  const HeadStream<Traits> stream{part, barriers};
  const HeadFlush<Traits> flush{part, barriers};
  part.origin = min(max(__ldcg(p.origin + slot), 0), p.ringRows - 1);
  part.pending = min(max(__ldcg(p.pending + slot), 0), p.window);
  part.loadKeys(threadIdx.x);
  part.loadHeads(threadIdx.x);
  const bool flushes = part.flushes();
  if (flushes) {
    if (threadIdx.x == 0) part.save();
    flush.init(layout, shared);
    flush.start();
  } else {
    stream.start();
  }
  releaseDependents();
  loadsWaitGroups();
  __syncthreads();
  part.multiplyKeys();
  if (!flushes && warp == Traits::kWarps - 1) QueryFragments<Traits>::make(part);
  if constexpr (Traits::kGdn) {
    if (warp == Traits::kWarps - 2) setNorms(part);
  }
  part.appendKeys(threadIdx.x);
  if (flushes) flush.prepareVectors();
  part.appendHeads(threadIdx.x);
  __syncthreads();
  if (flushes) {
    flush.makeWeights();
    __syncthreads();
    flush.run();
  } else {
    stream.run();
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksWanted)
    narrowUpdateKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ NarrowLayout layout) {
  extern __shared__ __align__(128) char shared[];
  if constexpr (Traits::kPlain) {
    ResidentUpdate<Traits>{p, layout, shared, static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32)}
        .run();
  } else {
    updatePart<Traits>(p, layout, shared);
  }
}

}  // namespace replayssm
