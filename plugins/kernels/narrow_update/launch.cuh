// How a problem with narrow states maps to a launch: a pure function, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "../common/launch.cuh"
#include "../replay_update/dispatch.h"
#include "kernel.cuh"
#include "launch_gdn.cuh"
#include "sizes.cuh"

namespace replayssm {

constexpr int kMostStages = 2;  // that a launch is given; more gained nothing

// CTAs that stay: as many as have room at a time, but none without a head for each warp.
template <class Traits>
int residentGrid(const UpdateParams& p, int sharedBytes) {
  const int fitting = residentBlocks(sharedBytes);
  const int places = p.multiprocessors * (fitting < Traits::kBlocksWanted ? fitting : Traits::kBlocksWanted);
  const int rounds = (p.rows * p.heads + Traits::kWarps - 1) / Traits::kWarps;
  const int fewest = (p.rows + kMostHeadRows - 1) / kMostHeadRows;
  const int most = rounds < places ? rounds : places;
  return most > fewest ? most : fewest;
}

// Stages: as many as leave room for two CTAs, or those wished.
template <class Traits>
UpdateLaunch chooseNarrowLaunch(const UpdateParams& p, const LaunchWish& wish) {
  UpdateLaunch launch{};
  const int partHeads = choosePartHeads<Traits>(p, wish);
  if ((Traits::kOneToken && p.window > Traits::kPlainWindow) || !wish.allows(UpdateKernel::kParts) || partHeads == 0) {
    return launch;
  }
  launch.kernel = UpdateKernel::kParts;
  launch.partHeads = partHeads;
  launch.grid = static_cast<int>(static_cast<int64_t>(p.rows) * p.groups * partsOf(p.headsPerGroup, partHeads));
  launch.threads = Traits::kThreads;
  for (int stages = 1; stages <= kMostStages; ++stages) {
    const int bytes = narrowLayout<Traits>(p.window, p.tokens, partHeads, 1, stages).totalBytes;
    const bool wanted = wish.stages > 0 ? stages <= wish.stages : stages == 1 || residentBlocks(bytes) >= 2;
    if (bytes > kSharedBytes - kReservedBytes || !wanted) break;
    launch.stages = stages;
    launch.sharedBytes = bytes;
  }
  if constexpr (Traits::kPlain) launch.grid = residentGrid<Traits>(p, launch.sharedBytes);
  launch.rank = wish.stages == 0 || wish.stages == launch.stages ? launch.stages : 0;
  return launch;
}

template <class Traits>
cudaError_t launchNarrowUpdate(const UpdateParams& p, const UpdateLaunch& launch, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(p.rows), runs = static_cast<unsigned>(p.groups);
  const dim3 grid = Traits::kPlain ? dim3(static_cast<unsigned>(launch.grid))
                                   : dim3(rows, runs, static_cast<unsigned>(launch.grid) / rows / runs);
  return launchLarge(stream, p.programmaticLaunch, narrowUpdateKernel<Traits>, grid, launch.threads,
                     launch.sharedBytes, p,
                     narrowLayout<Traits>(p.window, p.tokens, launch.partHeads, 1, launch.stages));
}

// What an instance takes: the gated delta rule has a kernel of its own for one token.
template <class Traits>
UpdateLaunch chooseNarrow(const UpdateParams& p, const LaunchWish& wish) {
  if constexpr (Traits::kPlainGdn) {
    return chooseGdnLaunch<Traits>(p, wish);
  } else {
    return chooseNarrowLaunch<Traits>(p, wish);
  }
}

template <class Traits>
cudaError_t launchNarrow(const UpdateParams& p, const UpdateLaunch& launch, cudaStream_t stream) {
  if constexpr (Traits::kPlainGdn) {
    return launchGdn<Traits>(p, launch, stream);
  } else {
    return launchNarrowUpdate<Traits>(p, launch, stream);
  }
}

}  // namespace replayssm
