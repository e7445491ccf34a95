// The launch choice of the prompt scan, a pure function of sizes, and the launches.
#pragma once

#include "dispatch.h"
#include "gdn.cuh"
#include "gdn_prepare.cuh"
#include "mamba2.cuh"

namespace replayssm::prefill {

constexpr int kSharedOfCta = 232448;                  // bytes a CTA may take on sm_90
constexpr int kSharedOfMultiprocessor = 233472;       // bytes a multiprocessor has
constexpr int kSharedOfSystem = 1024;                 // of each resident CTA
constexpr int kFewestWarps = 2;

// With few sequences a head's rows go to several multiprocessors; each then makes the scores anew.
inline int chooseSplits(const PrefillParams& p) {
  const int slabs = p.headDim / 16;
  int best = 1;
  for (int splits = 2; slabs / splits >= kFewestWarps; ++splits) {
    if (slabs % splits != 0) continue;
    if (static_cast<int64_t>(p.rows) * p.heads * splits <= p.multiprocessors) best = splits;
  }
  return best;
}

// Two stages unless that would keep a CTA from its multiprocessor.
inline void chooseStages(PrefillLaunch& l, const PrefillParams& p, int oneStage, int twoStages, int resident) {
  if (static_cast<int64_t>(p.rows) * p.heads * l.splits <= p.multiprocessors) resident = 1;
  const int share = kSharedOfMultiprocessor / resident - kSharedOfSystem;
  const int budget = share < kSharedOfCta ? share : kSharedOfCta;
  l.stages = twoStages <= budget ? 2 : oneStage <= kSharedOfCta ? 1 : 0;
  l.sharedBytes = l.stages == 2 ? twoStages : oneStage;
}

template <class Kernel>
cudaError_t launchOne(Kernel kernel, dim3 grid, int threads, int sharedBytes, const PrefillParams& p,
                      cudaStream_t stream) {
  cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sharedBytes);
  if (code != cudaSuccess) return code;
  kernel<<<grid, threads, sharedBytes, stream>>>(p);
  return cudaGetLastError();
}

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
