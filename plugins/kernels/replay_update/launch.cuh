// How a problem maps to a launch: a pure function, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "../common/launch.cuh"
#include "deal.h"
#include "direct.cuh"
#include "dispatch.h"
#include "kernel.cuh"

namespace replayssm {

// Up to this much state a multiprocessor, starting a CTA for each head is quicker than filling a pipeline.
constexpr int64_t kDirectBytes = 160 << 10;
// Work is dealt in pieces of two heads while they are small; the last piece of the slowest team is the launch's tail.
constexpr int kPairBytes = 48 << 10;
constexpr int kMaxGridRows = 65535;

template <class Traits>
UpdateLaunch chooseLaunch(const UpdateParams& p) {
  SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  UpdateLaunch launch{};
  int64_t items = static_cast<int64_t>(p.rows) * p.heads;
  int64_t teams = static_cast<int64_t>(p.multiprocessors) * Traits::kTeams;
  launch.stages = layout.stages * Traits::kTeams;
  launch.direct = items * Traits::kStateBytes <= p.multiprocessors * kDirectBytes && p.rows <= kMaxGridRows;
  launch.workers = static_cast<int>(items < teams ? items : teams);
  launch.grid = static_cast<int>(items < p.multiprocessors ? items : p.multiprocessors);
  launch.pieceHeads = p.headsPerGroup % 2 == 0 && Traits::kStateBytes <= kPairBytes ? 2 : 1;
  launch.sharedBytes = launch.direct ? layout.keyBufferBytes + layout.stageBytes : layout.teamBytes * Traits::kTeams;
  return launch;
}

template <class Traits>
cudaError_t launchUpdate(const UpdateParams& problem, cudaStream_t stream) {
  UpdateParams p = problem;
  const UpdateLaunch launch = chooseLaunch<Traits>(p);
  const SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  p.deal = dealWork(p, launch.workers, launch.pieceHeads);
  if (launch.direct) {
    dim3 grid(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.rows));
    return launchLarge(stream, p.programmaticLaunch, directUpdateKernel<Traits>, grid, 32 * Traits::kWarps,
                       launch.sharedBytes, p, layout);
  }
  return launchLarge(stream, p.programmaticLaunch, streamedUpdateKernel<Traits>, dim3(static_cast<unsigned>(launch.grid)),
                     Traits::kThreads, launch.sharedBytes, p, layout, launch.workers);
}

}  // namespace replayssm
