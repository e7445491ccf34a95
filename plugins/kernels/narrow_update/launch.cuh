// How a problem with narrow states maps to a launch: a pure function, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "../common/launch.cuh"
#include "../replay_update/dispatch.h"
#include "kernel.cuh"

namespace replayssm {

constexpr int kSharedBytes = 233472;      // of a multiprocessor
constexpr int kReservedBytes = 1024;      // of it, for each CTA
constexpr int kFewestParts = 4;           // parts a multiprocessor before heads share one

// CTAs of `bytes` dynamic shared memory on a multiprocessor.
constexpr int residentBlocks(int bytes) { return kSharedBytes / (bytes + kReservedBytes); }

// Parts are as large as they may be while every multiprocessor gets several; stages, as many as leave room for two
// CTAs. Stages is 0 when the kernel does not serve the problem.
template <class Traits>
UpdateLaunch chooseNarrowLaunch(const UpdateParams& p) {
  UpdateLaunch launch{};
  if (Traits::kPlain && p.window > Traits::kPlainWindow) return launch;
  const int64_t groups = static_cast<int64_t>(p.rows) * p.groups;
  int rounds = kMaxPartHeads / Traits::kWarps;
  auto parts = [&](int heads) { return (p.headsPerGroup + heads - 1) / heads; };
  while (rounds > 1 && (parts(rounds * Traits::kWarps) == parts((rounds - 1) * Traits::kWarps) ||
                        groups * parts(rounds * Traits::kWarps) < int64_t{kFewestParts} * p.multiprocessors)) {
    --rounds;
  }
  launch.pieceHeads = rounds * Traits::kWarps < p.headsPerGroup ? rounds * Traits::kWarps : p.headsPerGroup;
  launch.grid = static_cast<int>(groups * parts(launch.pieceHeads));
  launch.workers = launch.grid;
  for (int stages = 1; stages <= 2; ++stages) {
    const int bytes = narrowLayout<Traits>(p.window, p.tokens, launch.pieceHeads, stages).totalBytes;
    if (bytes > kSharedBytes - kReservedBytes || (stages > 1 && residentBlocks(bytes) < 2)) break;
    launch.stages = stages;
    launch.sharedBytes = bytes;
  }
  return launch;
}

template <class Traits>
cudaError_t launchNarrowUpdate(const UpdateParams& p, cudaStream_t stream) {
  const UpdateLaunch launch = chooseNarrowLaunch<Traits>(p);
  const auto rows = static_cast<unsigned>(p.rows), groups = static_cast<unsigned>(p.groups);
  const dim3 grid(rows, groups, static_cast<unsigned>(launch.grid) / rows / groups);
  return launchLarge(stream, p.programmaticLaunch, narrowUpdateKernel<Traits>, grid, Traits::kThreads,
                     launch.sharedBytes, p, narrowLayout<Traits>(p.window, p.tokens, launch.pieceHeads, launch.stages));
}

}  // namespace replayssm
