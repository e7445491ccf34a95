// How a plain step maps to a launch: a pure function, and the launch itself.
#pragma once

#include "../common/launch.cuh"
#include "../replay_update/choose.h"
#include "kernel.cuh"

namespace replayssm::plain {

// Up to this much state a multiprocessor: the shortest chain from load to output wins.
template <class Traits>
constexpr int64_t kFewBytes = (Traits::kGdn ? 160 : 64) << 10;
constexpr int64_t kManyBytes = 1 << 20;  // likewise of GDN, by the kernel with the fewest instructions
constexpr int64_t kHintBytes = 64 << 10;  // hints of what a step will read are only in the way of more
constexpr int kPlainRank = 1 << 16;  // above all others: where this kernel serves, it is taken
constexpr int kUsualSharedBytes = 48 << 10;

template <class Traits>
int64_t stateBytes(const UpdateParams& p) {
  return static_cast<int64_t>(p.rows) * p.heads * Traits::kHeadDim * Traits::kStateDim * 4;
}

template <class Traits>
UpdateLaunch chooseLaunch(const UpdateParams& p, const LaunchWish& wish) {
  UpdateLaunch launch{};
  if (!wish.allows(UpdateKernel::kPlain)) return launch;
  const int64_t bytes = stateBytes<Traits>(p);
  launch.kernel = UpdateKernel::kPlain;
  launch.sharedBytes = plainLayout<Traits>(p.window).bytes;
  launch.grid = static_cast<int>(int64_t{p.rows} * p.heads * Traits::kParts);
  launch.threads = Traits::kThreads;
  const bool few = bytes <= p.multiprocessors * kFewBytes<Traits>;
  const bool many = !few && (bytes <= p.multiprocessors * kManyBytes || wish.names(UpdateKernel::kPlain));
  const bool taken = Traits::kGdn ? (Traits::kFolds ? few : many) : few || wish.names(UpdateKernel::kPlain);
  const bool serves = taken && p.rows <= kMaxGridRows && launch.sharedBytes <= kUsualSharedBytes;
  launch.rank = serves ? kPlainRank : 0;
  return launch;
}

template <class Traits>
cudaError_t launchUpdate(const UpdateParams& p, const UpdateLaunch& launch, cudaStream_t stream) {
  const PlainLayout layout = plainLayout<Traits>(p.window);
  UpdateParams hinted = p;
  hinted.programmaticLaunch = p.programmaticLaunch && stateBytes<Traits>(p) <= p.multiprocessors * kHintBytes;
  const dim3 grid(static_cast<unsigned>(p.headsPerGroup * Traits::kParts), static_cast<unsigned>(p.groups),
                  static_cast<unsigned>(p.rows));
  const auto kernel = p.settled ? plainUpdateKernel<Traits, true> : plainUpdateKernel<Traits, false>;
  return launchShared(stream, p.programmaticLaunch, kernel, grid, launch.threads, launch.sharedBytes, hinted, layout);
}

}  // namespace replayssm::plain
