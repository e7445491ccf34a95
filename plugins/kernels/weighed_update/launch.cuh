// How a problem of GDN maps to a launch: a pure function, and the launch itself.
#pragma once

#include "../replay_update/chosen_launch.cuh"
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
cudaError_t launchUpdate(const UpdateParams& p, const UpdateLaunch& launch, cudaStream_t stream) {
  return launchChosen(p, launch, stream, directUpdateKernel<Traits>, Traits::kParts, streamedUpdateKernel<Traits>,
                      sharedLayout<Traits>(p.window, p.tokens));
}

}  // namespace replayssm::weighed
