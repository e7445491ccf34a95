// How a problem maps to a launch: a pure function, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "../common/launch.cuh"
#include "choose.h"
#include "direct.cuh"
#include "kernel.cuh"

namespace replayssm {

// Work is dealt in pieces of two heads while they are small; the last piece of the slowest team is the launch's tail.
constexpr int kPairBytes = 48 << 10;

template <class Traits>
UpdateLaunch chooseLaunch(const UpdateParams& p, const LaunchWish& wish) {
  const SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  KernelSizes sizes{};
  sizes.headBytes = int64_t{Traits::kStateBytes};
  sizes.parts = 1;
  sizes.directThreads = 32 * Traits::kWarps;
  sizes.directBytes = layout.keyBufferBytes + layout.stageBytes;
  sizes.teams = Traits::kTeams;
  sizes.stages = layout.stages;
  sizes.streamedThreads = Traits::kThreads;
  sizes.streamedBytes = layout.teamBytes * Traits::kTeams;
  sizes.pieceHeads = p.headsPerGroup % 2 == 0 && Traits::kStateBytes <= kPairBytes ? 2 : 1;
  return chooseFloat32(p, sizes, wish);
}

template <class Traits>
cudaError_t launchUpdate(const UpdateParams& problem, const UpdateLaunch& launch, cudaStream_t stream) {
  UpdateParams p = problem;
  p.deal = launch.deal;
  const SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  if (launch.kernel == UpdateKernel::kDirect) {
    dim3 grid(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.rows));
    return launchLarge(stream, p.programmaticLaunch, directUpdateKernel<Traits>, grid, launch.threads,
                       launch.sharedBytes, p, layout);
  }
  return launchLarge(stream, p.programmaticLaunch, streamedUpdateKernel<Traits>, dim3(static_cast<unsigned>(launch.grid)),
                     launch.threads, launch.sharedBytes, p, layout, launch.workers);
}

}  // namespace replayssm
