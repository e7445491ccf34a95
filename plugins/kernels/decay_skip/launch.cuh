// The skipping update's launch: the update's own choice of grid and shared memory, but runs of whole groups, for which faded heads are
// looked up at once.
#pragma once

#include "../replay_update/launch.cuh"
#include "direct.cuh"

namespace replayssm {

template <class Traits>
cudaError_t launchSkippingUpdate(const UpdateParams& p, float logThreshold, cudaStream_t stream) {
  return launchChosen(p, chooseLaunch<Traits, true>(p, LaunchWish{}), stream, skippingDirectKernel<Traits>, 1,
                      skippingStreamedKernel<Traits>, sharedLayout<Traits>(p.window, p.tokens), logThreshold);
}

}  // namespace replayssm
