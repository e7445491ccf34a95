// The kernel of a plain step: what is known before its predecessor ends, the wait, and what the inputs are needed for.
#pragma once

#include "gdn.cuh"
#include "mamba2.cuh"

namespace replayssm::plain {

template <class Traits>
using StepOf = std::conditional_t<Traits::kGdn, GdnStep<Traits>, Mamba2Step<Traits>>;

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
__global__ void __launch_bounds__(Traits::kThreads, StepOf<Traits>::kResidentWarps / Traits::kWarps)
    plainUpdateKernel(const __grid_constant__ UpdateParams p, const __grid_constant__ PlainLayout layout) {
  extern __shared__ __align__(128) char shared[];
  using Step = StepOf<Traits>;
  const int group = blockIdx.y, head = group * p.headsPerGroup + blockIdx.x / Traits::kParts;
  Step step{{p, shared, layout, static_cast<int>(blockIdx.z), group, head,
             static_cast<int>(blockIdx.x % Traits::kParts), static_cast<int>(threadIdx.x / 32),
             static_cast<int>(threadIdx.x % 32)}};
  if constexpr (kSettled) {
    releaseDependents();
  } else {
    if (p.programmaticLaunch) prefetch<Traits>(step);
    waitForPredecessor();
  }
  step.info = fetchRow(p, step.row);
  if (step.info.idle()) {
    if constexpr (kSettled) waitForPredecessor();
    if (threadIdx.x < Traits::kRows) step.out()[step.part * Traits::kRows + threadIdx.x] = 0;
    return;
  }
  fetchCursors(p, step.info);
  typename Step::State state;
  step.loadState(state);
  typename Step::Inputs inputs = step.template expectInputs<kSettled>();
  if constexpr (!kSettled) step.loadInputs(inputs);
  typename Step::Records records;
  step.startRecords(inputs, records);
  if constexpr (kSettled && !Step::kWaitsLate) {
    waitForPredecessor();
    step.loadInputs(inputs);
  }
  step.prepare(state, records);
  if constexpr (kSettled && Step::kWaitsLate) waitForPredecessor();
  step.flush(state);
  if constexpr (kSettled && Step::kWaitsLate) step.loadInputs(inputs);
  step.finish(state, inputs, records, [] {
    if constexpr (!kSettled) releaseDependents();
  });
}

}  // namespace replayssm::plain
