// The choice of the kernel by the size of a group and the number of tokens.
#include "kernel.cuh"
#include "kernels/common/launch.cuh"

namespace replayssm {
namespace {

// As many blocks as run at once, each with about as many tokens.
template <class Kernel>
cudaError_t launch(Kernel kernel, int threads, int teams, int blocks, const GatedNormParams& p, cudaStream_t stream) {
  const int64_t along = (p.groups + teams - 1) / teams, room = int64_t{p.multiprocessors} * blocks / along;
  const int64_t each = room < 1 ? p.places : (p.places + room - 1) / room;
  const dim3 grid(static_cast<unsigned>((p.places + each - 1) / each), static_cast<unsigned>(along));
  return launchOn(stream, p.programmaticLaunch, kernel, grid, threads, p);
}

template <class Act, int kLanes>
cudaError_t launchLanes(const GatedNormParams& p, cudaStream_t stream) {
  constexpr int kThreads = normThreads(kLanes), kTeams = kThreads / kLanes;
  return launch(gatedNormKernel<Act, kLanes>, kThreads, kTeams, normBlocks(kLanes), p, stream);
}

template <class Act>
cudaError_t chooseLanes(const GatedNormParams& p, cudaStream_t stream) {
  const int lanes = p.size / kNormVector;
  if (!p.wide || lanes > 256) {
    const int teams = kMinNormThreads / 32;
    const dim3 grid(static_cast<unsigned>(p.places), static_cast<unsigned>((p.groups + teams - 1) / teams));
    return launchOn(stream, p.programmaticLaunch, anyGatedNormKernel<Act>, grid, kMinNormThreads, p);
  }
  if (lanes <= 16) return launchLanes<Act, 16>(p, stream);
  if (lanes <= 32) return launchLanes<Act, 32>(p, stream);
  if (lanes <= 128) return launchLanes<Act, 128>(p, stream);
  return launchLanes<Act, 256>(p, stream);
}

}  // namespace

cudaError_t launchGatedNorm(const GatedNormParams& p, cudaStream_t stream) {
  return p.float16 ? chooseLanes<__half>(p, stream) : chooseLanes<__nv_bfloat16>(p, stream);
}

}  // namespace replayssm
