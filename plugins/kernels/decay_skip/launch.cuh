// The skipping update's launch: the update's own choice of grid and shared memory.
#pragma once

#include "../replay_update/launch.cuh"
#include "direct.cuh"

namespace replayssm {

template <class Traits>
cudaError_t launchSkippingUpdate(const UpdateParams& problem, float logThreshold, cudaStream_t stream) {
  UpdateParams p = problem;
  const UpdateLaunch launch = chooseLaunch<Traits>(p, LaunchWish{});
  const SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  p.deal = launch.deal;
  if (launch.kernel == UpdateKernel::kDirect) {
    dim3 grid(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.rows));
    return launchLarge(stream, p.programmaticLaunch, skippingDirectKernel<Traits>, grid, launch.threads,
                       launch.sharedBytes, p, layout, logThreshold);
  }
  return launchLarge(stream, p.programmaticLaunch, skippingStreamedKernel<Traits>,
                     dim3(static_cast<unsigned>(launch.grid)), launch.threads, launch.sharedBytes, p, layout,
                     logThreshold, launch.workers);
}

}  // namespace replayssm
