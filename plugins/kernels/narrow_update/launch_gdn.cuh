// How a problem with narrow states maps to a launch of the gated delta rule's kernel for one token: a pure function, and
// the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "../common/launch.cuh"
#include "../replay_update/dispatch.h"
#include "kernel_gdn.cuh"
#include "sizes.cuh"

namespace replayssm {

constexpr int kMostReadGroups = 8;  // of a part: a warp each

template <class Traits>
struct GdnLaunch {
  GdnReads reads;
  NarrowLayout flush;
  int sharedBytes, parts;

  // A part of `groups` groups, or of partHeads heads of one. A flush takes as many groups at a time as give each warp a
  // head.
  GdnLaunch(const UpdateParams& p, int groups, int partHeads) {
    reads.groups = groups;
    reads.heads = groups > 1 ? p.headsPerGroup : partHeads;
    reads.runs = partsOf(p.headsPerGroup, reads.heads);
    reads.sets = p.groups / groups * reads.runs;
    parts = p.rows * reads.sets;
    reads.warpBits = groups == 8 ? 0 : groups == 4 ? 1 : groups == 2 ? 2 : 3;
    reads.splitBits = 0;
    while (reads.splitBits < 2 && (reads.heads << (reads.splitBits + 1)) <= 1 << reads.warpBits) ++reads.splitBits;
    int flushed = groups < Traits::kMostGroups ? groups : Traits::kMostGroups;
    while (flushed > 1 && flushed * p.headsPerGroup > Traits::kWarps) flushed /= 2;
    flush = narrowLayout<Traits>(p.window, 1, flushed * reads.heads, flushed, 1);
    const int areas = kBarrierArea + Traits::kWarps * GdnArea<Traits>::kBytes;
    reads.flushOffset = flush.totalBytes > areas ? flush.totalBytes : areas;
    sharedBytes = reads.flushOffset + 16;
  }
};

// Groups of a part: as many as leave two multiprocessors three parts, or those wished, else 1.
template <class Traits>
int choosePartGroups(const UpdateParams& p, const LaunchWish& wish) {
  for (int groups = kMostReadGroups; groups > 1; groups /= 2) {
    const int64_t parts = static_cast<int64_t>(p.rows) * p.groups / groups;
    if (p.groups % groups != 0 || p.headsPerGroup > Traits::kWarps) continue;
    if (wish.pieceHeads == groups * p.headsPerGroup) return groups;
    if (wish.pieceHeads == 0 && 2 * parts >= int64_t{3} * p.multiprocessors) return groups;
  }
  return 1;
}

template <class Traits>
UpdateLaunch chooseGdnLaunch(const UpdateParams& p, const LaunchWish& wish) {
  UpdateLaunch launch{};
  const int groups = choosePartGroups<Traits>(p, wish);
  const int partHeads = groups > 1 ? groups * p.headsPerGroup : choosePartHeads<Traits>(p, wish);
  if (p.window > Traits::kPlainWindow || !wish.allows(UpdateKernel::kParts) || partHeads == 0) return launch;
  const GdnLaunch<Traits> chosen(p, groups, partHeads);
  if (chosen.sharedBytes > kSharedBytes - kReservedBytes) return launch;
  launch.kernel = UpdateKernel::kParts;
  launch.partHeads = partHeads;
  launch.threads = Traits::kThreads;
  launch.sharedBytes = chosen.sharedBytes;
  launch.stages = 2;
  const int places = p.multiprocessors * residentBlocks(chosen.sharedBytes);
  launch.grid = chosen.parts < places ? chosen.parts : places;
  launch.rank = wish.stages == 0 || wish.stages == launch.stages ? launch.stages : 0;
  return launch;
}

template <class Traits>
cudaError_t launchGdn(const UpdateParams& p, const UpdateLaunch& launch, cudaStream_t stream) {
  const int groups = launch.partHeads > p.headsPerGroup ? launch.partHeads / p.headsPerGroup : 1;
  GdnLaunch<Traits> chosen(p, groups, launch.partHeads);
  chosen.reads.rowStep = launch.grid / chosen.reads.sets;
  chosen.reads.setStep = launch.grid % chosen.reads.sets;
  return launchLarge(stream, p.programmaticLaunch, narrowGdnKernel<Traits>, dim3(static_cast<unsigned>(launch.grid)),
                     launch.threads, launch.sharedBytes, p, chosen.flush, chosen.reads);
}

}  // namespace replayssm
