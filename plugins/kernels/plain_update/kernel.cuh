// The kernel of a plain step: loads, weights, one barrier, and each warp finishes its rows.
#pragma once

#include "finish.cuh"

namespace replayssm::plain {

// Warps of a multiprocessor: leaves a thread 80 registers, GDN 128.
template <class Traits>
constexpr int kResidentWarps = Traits::kGdn ? 16 : 24;

// While the predecessor runs: what the step will probably read, into the L2. The slot may still change, so it is a hint
// and nothing else is taken from it.
template <class Traits>
__device__ __forceinline__ void prefetch(const Step<Traits>& step) {
  const UpdateParams& p = step.p;
  Step<Traits> hint = step;
  hint.info = fetchRow(p, step.row);
  if (hint.info.idle()) return;
  if (step.lane == 0) bulkPrefetch(hint.state(), Traits::kWarpRows * Traits::kStateDim * 4);
  if (step.lane != 1 || step.warp != 0 || step.part != 0) return;
  bulkPrefetch(hint.ringValues(), p.ringRows * Traits::kHeadDim * 2);
  prefetchLine(hint.ringNumbers());
  prefetchLine(p.origin + hint.info.slot);
  prefetchLine(p.pending + hint.info.slot);
  if (!step.leadsGroup()) return;
  bulkPrefetch(hint.ringKeys(), p.ringRows * Traits::kStateDim * 2);
  if (Traits::kGdn) prefetchLine(hint.ringFactors());
}

// kSettled: the promise of RSSM_UPDATE_SETTLED_STATE, under which only the step's inputs follow the wait.
template <class Traits, bool kSettled>
__global__ void __launch_bounds__(Traits::kThreads, kResidentWarps<Traits> / Traits::kWarps)
    plainUpdateKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ PlainLayout layout) {
  extern __shared__ __align__(128) char shared[];
  Step<Traits> step{p, shared, layout, static_cast<int>(blockIdx.y),
                    static_cast<int>(blockIdx.x) / Traits::kParts, static_cast<int>(blockIdx.x) % Traits::kParts,
                    static_cast<int>(threadIdx.x) / 32, static_cast<int>(threadIdx.x) % 32};
  if constexpr (kSettled) {
    releaseDependents();
  } else {
    if (p.programmaticLaunch) prefetch(step);
    waitForPredecessor();
  }
  step.info = fetchRow(p, step.row);
  if (step.info.idle()) {
    if constexpr (kSettled) waitForPredecessor();
    if (threadIdx.x < Traits::kRows) step.out()[step.part * Traits::kRows + threadIdx.x] = 0;
    return;
  }
  float4 s[Traits::kWarpRows];
  step.loadState(s);
  TokenScalars in = TokenScalars::constants(step);
  uint2 key, query;
  const auto loadInputs = [&] {
    query = loadInput(step.vector(p.q));
    key = loadInput(step.vector(p.k));
    in.load(step);
  };
  if constexpr (!kSettled) loadInputs();
  fetchCursors(p, step.info);
  float number[2], factor[2];
  step.loadNumbers(number, factor);
  uint2 rows[Traits::kPassRows];
  step.loadKeys(rows, step.warp);
  step.loadValues();
  Decay decay = weigh(step, in, number, factor);
  if constexpr (kSettled) {
    waitForPredecessor();
    loadInputs();
  }
  decay.draft = in.log(Traits::kGdn);
  uint2 vectors[Traits::kVectors];
  vectors[0] = key;
  vectors[Traits::kVectors - 1] = query;
  step.weighRecords(vectors, key, decay, rows);
  if constexpr (!kSettled) releaseDependents();
  float part[Traits::kVectors];
#pragma unroll
  for (int v = 0; v < Traits::kVectors; ++v) {
    const float4 vector = unpack<typename Traits::Act>(vectors[v]);
    float sums[Traits::kWarpRows];
#pragma unroll
    for (int r = 0; r < Traits::kWarpRows; ++r) sums[r] = dot(s[r], vector);
    part[v] = dealRows(sums, step.lane);
  }
  loadsDrain();
  __syncthreads();
  if constexpr (Traits::kGdn) {
    finishGdn(step, part, in, decay);
  } else {
    finishMamba2(step, part, in, decay);
  }
  if (step.appendsKey()) step.appendKey(key);
  if (step.flushes()) step.fold(s, decay);
}

}  // namespace replayssm::plain
