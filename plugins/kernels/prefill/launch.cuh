// The launch choice of the prompt scan, a pure function of sizes, and the launches.
#pragma once

#include "dispatch.h"
#include "gdn.cuh"
#include "gdn_prepare.cuh"
#include "mamba2.cuh"

namespace replayssm::prefill {

constexpr int kSharedOfCta = 232448;  // bytes a CTA may take on sm_90
constexpr int kFewestWarps = 2;

// CTAs that share a head of `slabs` times 16 state rows: enough for a CTA to hold its share, and more while that fills
// multiprocessors that would idle; each then makes the scores anew. 0: the rows cannot be shared so.
inline int chooseSplits(const PrefillParams& p, int maxSlabs) {
  const int slabs = p.headDim / 16;
  int best = 0;
  for (int splits = 1; splits <= slabs; ++splits) {
    if (slabs % splits != 0 || slabs / splits > maxSlabs) continue;
    const bool idle = static_cast<int64_t>(p.rows) * p.heads * splits <= p.multiprocessors;
    if (best == 0 || (idle && slabs / splits >= kFewestWarps)) best = splits;
  }
  return best;
}

// Two stages where they fit.
inline void chooseStages(PrefillLaunch& l, int oneStage, int twoStages) {
  l.stages = twoStages <= kSharedOfCta ? 2 : oneStage <= kSharedOfCta ? 1 : 0;
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

template <class Act, int kStateDim, int kWarps, int kHeads>
struct mamba2 {  // spelt as in supported.inc
  using Traits = Mamba2Prefill<Act, kStateDim, kWarps, kHeads>;

  // Two heads a CTA share keys, queries and scores where there is work for all multiprocessors anyway.
  static PrefillLaunch plan(const PrefillParams& p) {
    PrefillLaunch l{};
    l.splits = chooseSplits(p, kWarps);
    if (l.splits == 0) return l;
    const bool enough = static_cast<int64_t>(p.rows) * p.heads >= kHeads * static_cast<int64_t>(p.multiprocessors);
    if (kHeads > 1 && (p.headsPerGroup % kHeads != 0 || l.splits != 1 || !enough)) return l;
    l.warps = p.headDim / 16 / l.splits * kHeads;
    l.sharedBytes = Traits::kSharedBytes;
    l.stages = l.sharedBytes <= kSharedOfCta ? 2 : 0;
    return l;
  }

  static cudaError_t launch(const PrefillParams& p, const PrefillLaunch& l, cudaStream_t stream) {
    return launchOne(mamba2PrefillKernel<Traits>, dim3(p.heads / kHeads * l.splits, p.rows),
                     32 * (l.warps + Traits::kHelpers), l.sharedBytes, p, stream);
  }
};

template <class Act, int kStateDim, int kWarps, int kHeads>
struct gdn {
  static_assert(kHeads == 1, "a CTA holds one head");
  using Traits = GdnPrefill<Act, kStateDim, kWarps>;
  using Prepare = GdnPrepare<Act, kStateDim>;
  static constexpr int kChunk = Traits::kChunk;

  static PrefillLaunch plan(const PrefillParams& p) {
    PrefillLaunch l{};
    l.splits = chooseSplits(p, kWarps);
    if (l.splits == 0) return l;
    l.warps = p.headDim / 16 / l.splits;
    chooseStages(l, Traits::kOneStage, Traits::kTwoStages);
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
