// The choice of the norm's and the activation's kernel by type, size and alignment.
#include "activation.cuh"
#include "kernels/common/launch.cuh"
#include "rms_norm.cuh"

namespace replayssm {
namespace {

constexpr unsigned kRowsAlongY = 32768;

template <class Act, bool kParts>
cudaError_t launchNorm(const RmsNormParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.rows));
  if (!p.wide || p.size > kMaxRowThreads * kRowVector) {
    return launchOn(stream, p.programmaticLaunch, anyRmsNormKernel<Act, kParts>, grid, 256, p);
  }
  const int threads = (p.size / kRowVector + 31) / 32 * 32;
  return launchOn(stream, p.programmaticLaunch, rmsNormKernel<Act, kParts>, grid, threads, p);
}

template <class Act>
cudaError_t chooseParts(const RmsNormParams& p, cudaStream_t stream) {
  return p.parts > 0 ? launchNorm<Act, true>(p, stream) : launchNorm<Act, false>(p, stream);
}

template <class Act, int kFunction, int kVector>
cudaError_t launchVector(const ActivationParams& p, cudaStream_t stream) {
  const int64_t words = (static_cast<int64_t>(p.groups) * p.size + kVector - 1) / kVector;
  const int64_t rows = p.rows < kRowsAlongY ? p.rows : kRowsAlongY;
  const dim3 grid(static_cast<unsigned>((words + kActivationThreads - 1) / kActivationThreads),
                  static_cast<unsigned>(rows), static_cast<unsigned>((p.rows + rows - 1) / rows));
  const auto kernel = activationKernel<Act, kFunction, kVector>;
  return launchOn(stream, p.programmaticLaunch, kernel, grid, kActivationThreads, p);
}

template <class Act, int kFunction>
cudaError_t chooseVector(const ActivationParams& p, cudaStream_t stream) {
  return p.wide ? launchVector<Act, kFunction, 8>(p, stream) : launchVector<Act, kFunction, 1>(p, stream);
}

template <class Act>
cudaError_t chooseFunction(const ActivationParams& p, cudaStream_t stream) {
  if (p.function == RSSM_SILU) return chooseVector<Act, RSSM_SILU>(p, stream);
  if (p.function == RSSM_SIGMOID) return chooseVector<Act, RSSM_SIGMOID>(p, stream);
  return chooseVector<Act, RSSM_RELU2>(p, stream);
}

}  // namespace

cudaError_t launchRmsNorm(const RmsNormParams& p, cudaStream_t stream) {
  return p.float16 ? chooseParts<__half>(p, stream) : chooseParts<__nv_bfloat16>(p, stream);
}

cudaError_t launchActivation(const ActivationParams& p, cudaStream_t stream) {
  return p.float16 ? chooseFunction<__half>(p, stream) : chooseFunction<__nv_bfloat16>(p, stream);
}

}  // namespace replayssm
