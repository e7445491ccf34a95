// The launch of one of a recurrence's two kernels over float32 states, as chosen.
#pragma once

#include "../common/launch.cuh"
#include "choose.h"

namespace replayssm {

// `direct` has a grid of `headCtas` a head and a row, and takes p and args; `streamed` the number of workers behind them.
template <class Direct, class Streamed, class... Args>
cudaError_t launchChosen(const UpdateParams& problem, const UpdateLaunch& launch, cudaStream_t stream, Direct direct,
                         int headCtas, Streamed streamed, const Args&... args) {
  UpdateParams p = problem;
  p.deal = launch.deal;
  if (launch.kernel == UpdateKernel::kDirect) {
    const dim3 grid(static_cast<unsigned>(p.heads * headCtas), static_cast<unsigned>(p.rows));
    return launchLarge(stream, p.programmaticLaunch, direct, grid, launch.threads, launch.sharedBytes, p, args...);
  }
  return launchLarge(stream, p.programmaticLaunch, streamed, dim3(static_cast<unsigned>(launch.grid)), launch.threads,
                     launch.sharedBytes, p, args..., launch.workers);
}

}  // namespace replayssm
