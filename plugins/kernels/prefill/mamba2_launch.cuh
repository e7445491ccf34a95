// The prompt scan of Mamba-2: its launch choice, a pure function of sizes, and the launch.
#pragma once

#include "launch.cuh"
#include "mamba2.cuh"

namespace replayssm::prefill {

template <class Act, int kStateDim, int kWarps, int kResident>
struct mamba2 {  // spelt as in supported.inc
  using Traits = Mamba2Prefill<Act, kStateDim, kWarps, kResident>;

  static PrefillLaunch plan(const PrefillParams& p) {
    PrefillLaunch l{};
    l.splits = chooseSplits(p);
    l.warps = p.headDim / 16 / l.splits;
    chooseStages(l, p, Traits::kOneStage, Traits::kTwoStages, kResident);
    return l;
  }

  static cudaError_t launch(const PrefillParams& p, const PrefillLaunch& l, cudaStream_t stream) {
    return launchOne(mamba2PrefillKernel<Traits>, dim3(p.heads * l.splits, p.rows), 32 * l.warps, l.sharedBytes, p,
                     stream);
  }
};

}  // namespace replayssm::prefill
