// The skipping update's launch: the update's own choice of grid and shared memory.
#pragma once

#include "../replay_update/launch.cuh"
#include "direct.cuh"

namespace replayssm {

template <class Traits>
cudaError_t launchSkippingUpdate(const UpdateParams& p, float logThreshold, cudaStream_t stream) {
  return launchChosen(p, chooseLaunch<Traits>(p, LaunchWish{}), stream, skippingDirectKernel<Traits>, 1,
                      skippingStreamedKernel<Traits>, sharedLayout<Traits>(p.window, p.tokens), logThreshold);
}

}  // namespace replayssm
