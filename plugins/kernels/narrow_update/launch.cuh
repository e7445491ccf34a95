// How a problem with narrow states maps to a launch: a pure function, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "../common/launch.cuh"
#include "../replay_update/dispatch.h"
#include "kernel.cuh"

namespace replayssm {

constexpr int kSharedBytes = 233472;      // of a multiprocessor
constexpr int kReservedBytes = 1024;      // of it, for each CTA
constexpr int kMostStages = 2;            // that a launch is given; more gained nothing
constexpr int kFewestParts = 4;           // parts a multiprocessor before heads share one

// CTAs of `bytes` dynamic shared memory on a multiprocessor.
constexpr int residentBlocks(int bytes) { return kSharedBytes / (bytes + kReservedBytes); }

constexpr int partsOf(int heads, int partHeads) { return (heads + partHeads - 1) / partHeads; }

// Heads of a part: as many as they may be while every multiprocessor gets several parts; 0: not those wished.
template <class Traits>
int choosePartHeads(const UpdateParams& p, const LaunchWish& wish) {
  auto heads = [&](int rounds) {
    return rounds * Traits::kWarps < p.headsPerGroup ? rounds * Traits::kWarps : p.headsPerGroup;
  };
  if (wish.pieceHeads > 0) {
    for (int rounds = Traits::kMaxRounds; rounds > 0; --rounds) {
      if (heads(rounds) == wish.pieceHeads) return wish.pieceHeads;
    }
    return 0;
  }
  const int64_t groups = static_cast<int64_t>(p.rows) * p.groups;
  int rounds = Traits::kMaxRounds;
  while (rounds > 1 && (partsOf(p.headsPerGroup, heads(rounds)) == partsOf(p.headsPerGroup, heads(rounds - 1)) ||
                        groups * partsOf(p.headsPerGroup, heads(rounds)) < int64_t{kFewestParts} * p.multiprocessors)) {
    --rounds;
  }
  return heads(rounds);
}

// Stages: as many as leave room for two CTAs, or those wished.
template <class Traits>
UpdateLaunch chooseNarrowLaunch(const UpdateParams& p, const LaunchWish& wish) {
  UpdateLaunch launch{};
  const int partHeads = choosePartHeads<Traits>(p, wish);
  if ((Traits::kPlain && p.window > Traits::kPlainWindow) || !wish.allows(UpdateKernel::kParts) || partHeads == 0) {
    return launch;
  }
  launch.kernel = UpdateKernel::kParts;
  launch.partHeads = partHeads;
  launch.grid = static_cast<int>(static_cast<int64_t>(p.rows) * p.groups * partsOf(p.headsPerGroup, partHeads));
  launch.threads = Traits::kThreads;
  for (int stages = 1; stages <= kMostStages; ++stages) {
    const int bytes = narrowLayout<Traits>(p.window, p.tokens, partHeads, stages).totalBytes;
    const bool wanted = wish.stages > 0 ? stages <= wish.stages : stages == 1 || residentBlocks(bytes) >= 2;
    if (bytes > kSharedBytes - kReservedBytes || !wanted) break;
    launch.stages = stages;
    launch.sharedBytes = bytes;
  }
  launch.rank = wish.stages == 0 || wish.stages == launch.stages ? launch.stages : 0;
  return launch;
}

template <class Traits>
cudaError_t launchNarrowUpdate(const UpdateParams& p, const UpdateLaunch& launch, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(p.rows), groups = static_cast<unsigned>(p.groups);
  const dim3 grid(rows, groups, static_cast<unsigned>(launch.grid) / rows / groups);
  return launchLarge(stream, p.programmaticLaunch, narrowUpdateKernel<Traits>, grid, launch.threads,
                     launch.sharedBytes, p, narrowLayout<Traits>(p.window, p.tokens, launch.partHeads, launch.stages));
}

}  // namespace replayssm
