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

// Groups of a part, where it may be of several: as many as give each warp a head while every multiprocessor gets
// several parts, two of which fit it at a time; those wished, else 1.
template <class Traits>
int choosePartGroups(const UpdateParams& p, const LaunchWish& wish) {
  for (int groups = Traits::kMostGroups; groups > 1; groups /= 2) {
    const int heads = groups * p.headsPerGroup;
    const int64_t parts = static_cast<int64_t>(p.rows) * p.groups / groups;
    if (p.groups % groups != 0 || heads > Traits::kWarps) continue;
    if (wish.pieceHeads == heads) return groups;
    const int bytes = narrowLayout<Traits>(p.window, p.tokens, heads, groups, 1).totalBytes;
    if (wish.pieceHeads == 0 && parts >= int64_t{kFewestParts} * p.multiprocessors && residentBlocks(bytes) >= 2) {
      return groups;
    }
  }
  return 1;
}

// Heads of a part of one group: as many as they may be while every multiprocessor gets several parts; 0: not those
// wished.
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
  const int groups = choosePartGroups<Traits>(p, wish);
  const int partHeads = groups > 1 ? groups * p.headsPerGroup : choosePartHeads<Traits>(p, wish);
  if ((Traits::kOneToken && p.window > Traits::kPlainWindow) || !wish.allows(UpdateKernel::kParts) || partHeads == 0) {
    return launch;
  }
  launch.kernel = UpdateKernel::kParts;
  launch.partHeads = partHeads;
  launch.grid = static_cast<int>(static_cast<int64_t>(p.rows) * p.groups / groups *
                                 partsOf(groups * p.headsPerGroup, partHeads));
  launch.threads = Traits::kThreads;
  for (int stages = 1; stages <= kMostStages; ++stages) {
    const int bytes = narrowLayout<Traits>(p.window, p.tokens, partHeads, groups, stages).totalBytes;
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
  const int groups = launch.partHeads > p.headsPerGroup ? launch.partHeads / p.headsPerGroup : 1;
  const auto rows = static_cast<unsigned>(p.rows), runs = static_cast<unsigned>(p.groups / groups);
  const dim3 grid(rows, runs, static_cast<unsigned>(launch.grid) / rows / runs);
  return launchLarge(stream, p.programmaticLaunch, narrowUpdateKernel<Traits>, grid, launch.threads,
                     launch.sharedBytes, p,
                     narrowLayout<Traits>(p.window, p.tokens, launch.partHeads, groups, launch.stages));
}

}  // namespace replayssm
