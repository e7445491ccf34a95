// The prompt scan of GDN: its launch choice, a pure function of sizes, and the launches of its two kernels.
#pragma once

#include "gdn.cuh"
#include "gdn_prepare.cuh"
#include "launch.cuh"

namespace replayssm::prefill {

template <class Act, int kStateDim, int kWarps, int kResident>
struct gdn {
  using Traits = GdnPrefill<Act, kStateDim, kWarps>;
  using Prepare = GdnPrepare<Act, kStateDim>;
  static constexpr int kChunk = Traits::kChunk;

  static PrefillLaunch plan(const PrefillParams& p) {
    PrefillLaunch l{};
    l.splits = chooseSplits(p);
    l.warps = p.headDim / 16 / l.splits;
    chooseStages(l, p, Traits::kOneStage, Traits::kTwoStages, kResident);
    l.recordBytes = static_cast<size_t>(p.rows) * recordChunks(p.window, p.tokens, kChunk) * p.heads *
                    sizeof(GdnRecord<kChunk>);
    return l;
  }

  static cudaError_t launch(const PrefillParams& p, const PrefillLaunch& l, cudaStream_t stream) {
    const int chunks = recordChunks(p.window, p.tokens, kChunk);
    cudaError_t code = launchOne(gdnPrepareKernel<Prepare>, dim3(chunks * p.groups, p.rows), Prepare::kThreads,
                                 Prepare::kSharedBytes, p, stream);
    if (code != cudaSuccess) return code;
    return launchOne(gdnPrefillKernel<Traits>, dim3(p.heads * l.splits, p.rows), 32 * l.warps, l.sharedBytes, p,
                     stream);
  }
};

}  // namespace replayssm::prefill
