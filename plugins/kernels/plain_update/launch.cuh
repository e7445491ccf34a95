// How a plain step maps to a launch: a pure function, and the launch itself.
#pragma once

#include "../common/launch.cuh"
#include "../replay_update/dispatch.h"
#include "kernel.cuh"

namespace replayssm::plain {

// Up to this much state a multiprocessor all CTAs run at once, and the shortest chain from load to output wins.
constexpr int64_t kPlainBytes = 64 << 10;
constexpr int kEveryStage = 1 << 16;  // more than any ring of stages: where this kernel serves, it is taken
constexpr int kUsualSharedBytes = 48 << 10;

template <class Traits>
UpdateLaunch chooseLaunch(const UpdateParams& p) {
  UpdateLaunch launch{};
  const int64_t stateBytes = static_cast<int64_t>(p.rows) * p.heads * Traits::kHeadDim * Traits::kStateDim * 4;
  launch.direct = true;
  launch.sharedBytes = plainLayout<Traits>(p.window).bytes;
  launch.grid = p.rows * p.heads * Traits::kParts;
  launch.workers = launch.grid;
  launch.pieceHeads = 1;
  const bool serves = stateBytes <= p.multiprocessors * kPlainBytes && launch.sharedBytes <= kUsualSharedBytes;
  launch.stages = serves ? kEveryStage : 0;
  return launch;
}

template <class Traits>
cudaError_t launchUpdate(const UpdateParams& p, cudaStream_t stream) {
  const PlainLayout layout = plainLayout<Traits>(p.window);
  const dim3 grid(static_cast<unsigned>(p.heads * Traits::kParts), static_cast<unsigned>(p.rows));
  return launchShared(stream, p.programmaticLaunch, plainUpdateKernel<Traits>, grid, Traits::kThreads, layout.bytes, p,
                      layout);
}

}  // namespace replayssm::plain
