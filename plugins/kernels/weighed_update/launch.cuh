// How a problem maps to a launch: a pure function, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "../common/launch.cuh"
#include "../replay_update/choose.h"
#include "direct.cuh"

namespace replayssm::weighed {

template <class Traits>
UpdateLaunch chooseLaunch(const UpdateParams& p, const LaunchWish& wish) {
  const SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  KernelSizes sizes{};
  sizes.headBytes = int64_t{Traits::kStateBytes} * Traits::kParts;
  sizes.parts = Traits::kParts;
  sizes.directThreads = 32 * kDirectWarps<Traits>;
  sizes.directBytes = Traits::kStateBytes + layout.slotBytes + layout.keyBufferBytes;
  sizes.teams = Traits::kTeams;
  sizes.stages = layout.stages;
  sizes.streamedThreads = Traits::kThreads;
  sizes.streamedBytes = layout.teamBytes * Traits::kTeams;
  sizes.pieceHeads = p.headsPerGroup % 2 == 0 ? 2 : 1;
  return chooseFloat32(p, sizes, wish);
}

template <class Traits>
cudaError_t launchUpdate(const UpdateParams& problem, const UpdateLaunch& launch, cudaStream_t stream) {
  UpdateParams p = problem;
  p.deal = launch.deal;
  const SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  if (launch.kernel == UpdateKernel::kDirect) {
    dim3 grid(static_cast<unsigned>(p.heads * Traits::kParts), static_cast<unsigned>(p.rows));
    return launchLarge(stream, p.programmaticLaunch, directUpdateKernel<Traits>, grid, launch.threads,
                       launch.sharedBytes, p, layout);
  }
  return launchLarge(stream, p.programmaticLaunch, streamedUpdateKernel<Traits>, dim3(static_cast<unsigned>(launch.grid)),
                     launch.threads, launch.sharedBytes, p, layout, launch.workers);
}

}  // namespace replayssm::weighed
