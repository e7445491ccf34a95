// What the launches of both recurrences' prompt scans share: the choice of splits and stages, pure functions of sizes.
#pragma once

#include "dispatch.h"

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

}  // namespace replayssm::prefill
