// How a problem of Mamba-2 maps to a launch: a pure function, and the launch itself.
#pragma once

#include "chosen_launch.cuh"
#include "direct.cuh"
#include "kernel.cuh"

namespace replayssm {

// Work is dealt in pieces of two heads while they are small; the last piece of the slowest team is the launch's tail.
// Runs of four heads keep what all teams touch together, outputs above all. With several tokens a run's start costs
// more: there runs and, in large batches, pieces of four suit small heads alone, and whole groups others. One token of
// few rows: runs of two and pieces of one, of which few are drawn.
constexpr int kPairBytes = 48 << 10;
constexpr int kFourBytes = 32 << 10;

// kWholeGroups: runs of whole groups in any case.
template <class Traits, bool kWholeGroups = false>
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
  sizes.fewRunHeads = !kWholeGroups && Traits::kSingle ? 2 : 0;
  if (!kWholeGroups && p.headsPerGroup % 4 == 0) {
    const bool small = Traits::kStateBytes <= kFourBytes;
    sizes.runHeads = small || Traits::kSingle ? 4 : 0;
    sizes.manyPieceHeads = small && !Traits::kSingle ? 4 : 0;
  }
  return chooseFloat32(p, sizes, wish);
}

template <class Traits>
cudaError_t launchUpdate(const UpdateParams& p, const UpdateLaunch& launch, cudaStream_t stream) {
  return launchChosen(p, launch, stream, directUpdateKernel<Traits>, 1, streamedUpdateKernel<Traits>,
                      sharedLayout<Traits>(p.window, p.tokens));
}

}  // namespace replayssm
