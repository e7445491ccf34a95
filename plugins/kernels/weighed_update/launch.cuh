// How a problem maps to a launch: a pure function, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "../common/launch.cuh"
#include "../replay_update/deal.h"
#include "../replay_update/dispatch.h"
#include "direct.cuh"

namespace replayssm::weighed {

// Up to this much state a multiprocessor, starting a CTA for each head is quicker than filling a pipeline.
constexpr int64_t kDirectBytes = 160 << 10;
constexpr int kMaxGridRows = 65535;

template <class Traits>
UpdateLaunch chooseLaunch(const UpdateParams& p) {
  const SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  UpdateLaunch launch{};
  int64_t items = static_cast<int64_t>(p.rows) * p.heads;
  int64_t teams = static_cast<int64_t>(p.multiprocessors) * Traits::kTeams;
  launch.stages = layout.stages * Traits::kTeams;
  launch.direct = items * Traits::kStateBytes * Traits::kParts <= p.multiprocessors * kDirectBytes &&
                  p.rows <= kMaxGridRows;
  launch.workers = static_cast<int>(items < teams ? items : teams);
  launch.grid = static_cast<int>(items < p.multiprocessors ? items : p.multiprocessors);
  launch.pieceHeads = p.headsPerGroup % 2 == 0 ? 2 : 1;
  launch.sharedBytes = launch.direct ? Traits::kStateBytes + layout.slotBytes + layout.keyBufferBytes
                                     : layout.teamBytes * Traits::kTeams;
  return launch;
}

template <class Traits>
cudaError_t launchUpdate(const UpdateParams& problem, cudaStream_t stream) {
  UpdateParams p = problem;
  const SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  const UpdateLaunch launch = weighed::chooseLaunch<Traits>(p);
  p.deal = dealWork(p, launch.workers, launch.pieceHeads);
  if (launch.direct) {
    dim3 grid(static_cast<unsigned>(p.heads * Traits::kParts), static_cast<unsigned>(p.rows));
    return launchLarge(stream, p.programmaticLaunch, directUpdateKernel<Traits>, grid, kDirectWarps<Traits> * 32,
                       launch.sharedBytes, p, layout);
  }
  return launchLarge(stream, p.programmaticLaunch, streamedUpdateKernel<Traits>, dim3(static_cast<unsigned>(launch.grid)),
                     Traits::kThreads, launch.sharedBytes, p, layout, launch.workers);
}

}  // namespace replayssm::weighed
