// The choice of the kernel by the size of a group and the number of tokens.
#include "kernel.cuh"
#include "kernels/common/launch.cuh"

namespace replayssm {
namespace {

constexpr int kManyPlaces = 2;
// Above this many threads a multiprocessor, a team takes several tokens: fewer weights to load, more loads in flight.
constexpr int64_t kBusyThreads = 4096;

template <class Kernel>
cudaError_t launch(Kernel kernel, int threads, int teams, int places, const GatedNormParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.places + places - 1) / places),
                  static_cast<unsigned>((p.groups + teams - 1) / teams));
  return launchOn(stream, p.programmaticLaunch, kernel, grid, threads, p);
}

template <class Act, int kLanes>
cudaError_t choosePlaces(const GatedNormParams& p, cudaStream_t stream) {
  constexpr int kThreads = normThreads(kLanes), kTeams = kThreads / kLanes;
  const bool busy = p.places * p.groups * kLanes > p.multiprocessors * kBusyThreads;
  if (busy) return launch(gatedNormKernel<Act, kLanes, kManyPlaces>, kThreads, kTeams, kManyPlaces, p, stream);
  return launch(gatedNormKernel<Act, kLanes, 1>, kThreads, kTeams, 1, p, stream);
}

template <class Act>
cudaError_t chooseLanes(const GatedNormParams& p, cudaStream_t stream) {
  const int lanes = p.size / kNormVector;
  if (!p.wide || lanes > 256) {
    return launch(anyGatedNormKernel<Act>, kMinNormThreads, kMinNormThreads / 32, 1, p, stream);
  }
  if (lanes <= 16) return choosePlaces<Act, 16>(p, stream);
  if (lanes <= 32) return choosePlaces<Act, 32>(p, stream);
  if (lanes <= 128) return choosePlaces<Act, 128>(p, stream);
  return choosePlaces<Act, 256>(p, stream);
}

}  // namespace

cudaError_t launchGatedNorm(const GatedNormParams& p, cudaStream_t stream) {
  return p.float16 ? chooseLanes<__half>(p, stream) : chooseLanes<__nv_bfloat16>(p, stream);
}

}  // namespace replayssm
