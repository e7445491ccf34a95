// How a warp hands a buffer on: behind a __syncwarp one lane arrives for all. A race detector that credits an arrival
// with its own thread's accesses alone needs a build in which every lane arrives (REPLAYSSM_EVERY_LANE_ARRIVES).
//
//   if (kEveryLaneArrives || lane == 0) barrierArrive(barrier);  // initialised with kWarpArrivals for each warp
#pragma once

#include "mbarrier.cuh"

namespace replayssm {

#ifdef RSSM_EVERY_LANE_ARRIVES
constexpr bool kEveryLaneArrives = true;
#else
constexpr bool kEveryLaneArrives = false;
#endif
constexpr uint32_t kWarpArrivals = kEveryLaneArrives ? 32 : 1;

}  // namespace replayssm
