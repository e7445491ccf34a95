// How a plain step maps to a launch: a pure function, and the launch itself.
#pragma once

#include "../common/launch.cuh"
#include "../replay_update/choose.h"
#include "kernel.cuh"

namespace replayssm::plain {

// Up to this much state a multiprocessor all CTAs run at once, and the shortest chain from load to output wins.
constexpr int64_t kPlainBytes = 64 << 10;
constexpr int kPlainRank = 1 << 16;  // above all others: where this kernel serves, it is taken
constexpr int kUsualSharedBytes = 48 << 10;

template <class Traits>
UpdateLaunch chooseLaunch(const UpdateParams& p, const LaunchWish& wish) {
  UpdateLaunch launch{};
  if (!wish.allows(UpdateKernel::kPlain)) return launch;
  const int64_t stateBytes = static_cast<int64_t>(p.rows) * p.heads * Traits::kHeadDim * Traits::kStateDim * 4;
  launch.kernel = UpdateKernel::kPlain;
  launch.sharedBytes = plainLayout<Traits>(p.window).bytes;
  launch.grid = static_cast<int>(int64_t{p.rows} * p.heads * Traits::kParts);
  launch.threads = Traits::kThreads;
  const bool few = stateBytes <= p.multiprocessors * kPlainBytes || wish.names(UpdateKernel::kPlain);
  const bool serves = few && p.rows <= kMaxGridRows && launch.sharedBytes <= kUsualSharedBytes;
  launch.rank = serves ? kPlainRank : 0;
  return launch;
}

template <class Traits>
cudaError_t launchUpdate(const UpdateParams& p, const UpdateLaunch& launch, cudaStream_t stream) {
  const PlainLayout layout = plainLayout<Traits>(p.window);
  const dim3 grid(static_cast<unsigned>(p.heads * Traits::kParts), static_cast<unsigned>(p.rows));
  const auto kernel = p.settled ? plainUpdateKernel<Traits, true> : plainUpdateKernel<Traits, false>;
  return launchShared(stream, p.programmaticLaunch, kernel, grid, launch.threads, launch.sharedBytes, p, layout);
}

}  // namespace replayssm::plain
