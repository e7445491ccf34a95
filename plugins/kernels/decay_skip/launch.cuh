// The skipping update's launch: the update's own choice of grid and shared memory.
#pragma once

#include "../replay_update/launch.cuh"
#include "direct.cuh"

namespace replayssm {

template <class Traits>
cudaError_t launchSkippingUpdate(const UpdateParams& problem, float logThreshold, cudaStream_t stream) {
  UpdateParams p = problem;
  const UpdateLaunch launch = chooseLaunch<Traits>(p);
  p.pieceHeads = launch.pieceHeads;
  if (launch.direct) {
    dim3 grid(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.rows));
    return launchKernel(skippingDirectKernel<Traits>, grid, 32 * Traits::kWarps, launch.sharedBytes,
                        p.programmaticLaunch, stream, p, logThreshold);
  }
  return launchKernel(skippingStreamedKernel<Traits>, dim3(static_cast<unsigned>(launch.grid)), Traits::kThreads,
                      launch.sharedBytes, p.programmaticLaunch, stream, p, logThreshold, launch.workers);
}

}  // namespace replayssm
