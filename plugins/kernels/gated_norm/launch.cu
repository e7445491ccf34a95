// The choice of the kernel by the size of a group.
#include "kernel.cuh"
#include "kernels/common/launch.cuh"

namespace replayssm {
namespace {

constexpr int kVector = 8;  // channels a lane takes at a time

template <class Kernel>
cudaError_t launch(Kernel kernel, int lanes, const GatedNormParams& p, cudaStream_t stream) {
  const int64_t teams = kNormThreads / lanes;
  return launchOn(stream, p.programmaticLaunch, kernel, dim3(static_cast<unsigned>((p.items + teams - 1) / teams)),
                  kNormThreads, p);
}

template <class Act>
cudaError_t choose(const GatedNormParams& p, cudaStream_t stream) {
  if (!p.wide || p.size > 8 * 32 * kVector) return launch(anyGatedNormKernel<Act>, 32, p, stream);
  if (p.size <= 16 * kVector) return launch(gatedNormKernel<Act, 16, 1>, 16, p, stream);
  if (p.size <= 32 * kVector) return launch(gatedNormKernel<Act, 32, 1>, 32, p, stream);
  if (p.size <= 4 * 32 * kVector) return launch(gatedNormKernel<Act, 32, 4>, 32, p, stream);
  return launch(gatedNormKernel<Act, 32, 8>, 32, p, stream);
}

}  // namespace

cudaError_t launchGatedNorm(const GatedNormParams& p, cudaStream_t stream) {
  return p.float16 ? choose<__half>(p, stream) : choose<__nv_bfloat16>(p, stream);
}

}  // namespace replayssm
