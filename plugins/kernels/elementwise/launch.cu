// The choice of the norm's and the activation's kernel by type, size and alignment.
#include "activation.cuh"
#include "kernels/common/launch.cuh"
#include "rms_norm.cuh"

namespace replayssm {
namespace {

constexpr int64_t kRunsAlongY = 32768, kBusyThreads = 4096;  // of a multiprocessor

template <class Act, bool kParts>
cudaError_t launchNorm(const RmsNormParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.rows));
  if (!p.wide || p.size > kMaxRowThreads * kRowVector) {
    return launchOn(stream, p.programmaticLaunch, anyRmsNormKernel<Act, kParts>, grid, 256, p);
  }
  const int words = kParts ? 1 : kRowWords, piece = 32 * kRowVector * words;
  const int threads = (p.size + piece - 1) / piece * 32;
  const auto kernel = kParts ? partsRmsNormKernel<Act> : rmsNormKernel<Act>;
  return launchOn(stream, p.programmaticLaunch, kernel, grid, threads, p);
}

template <class Act>
cudaError_t chooseParts(const RmsNormParams& p, cudaStream_t stream) {
  return p.parts > 0 ? launchNorm<Act, true>(p, stream) : launchNorm<Act, false>(p, stream);
}

// Threads of a block over `words`: whole warps, as few of them idle as can be, large blocks before small ones.
int activationThreads(int64_t words) {
  int best = 0;
  int64_t fewest = 0;
  for (int threads = kMaxActivationThreads; threads >= 128; threads -= 32) {
    const int64_t used = (words + threads - 1) / threads * threads;
    if (best == 0 || used < fewest) {
      best = threads;
      fewest = used;
    }
  }
  return best;
}

template <class Act, int kFunction, int kVector, bool kFactor, int kRows>
cudaError_t launchVector(const ActivationParams& p, cudaStream_t stream) {
  const int64_t words = (static_cast<int64_t>(p.groups) * p.size + kVector - 1) / kVector;
  const int threads = activationThreads(words);
  const int64_t runs = (p.rows + kRows - 1) / kRows, along = runs < kRunsAlongY ? runs : kRunsAlongY;
  const dim3 grid(static_cast<unsigned>((words + threads - 1) / threads), static_cast<unsigned>(along),
                  static_cast<unsigned>((runs + along - 1) / along));
  const auto kernel = activationKernel<Act, kFunction, kVector, kFactor, kRows>;
  return launchOn(stream, p.programmaticLaunch, kernel, grid, threads, p);
}

// Many rows: several a thread, whose loads are on their way together.
template <class Act, int kFunction, int kVector, bool kFactor>
cudaError_t chooseRows(const ActivationParams& p, cudaStream_t stream) {
  const int64_t words = p.rows * p.groups * p.size / kVector;
  if (words > int64_t{p.multiprocessors} * kBusyThreads) {
    return launchVector<Act, kFunction, kVector, kFactor, 2>(p, stream);
  }
  return launchVector<Act, kFunction, kVector, kFactor, 1>(p, stream);
}

template <class Act, int kFunction, int kVector>
cudaError_t chooseFactor(const ActivationParams& p, cudaStream_t stream) {
  return p.factor != nullptr ? chooseRows<Act, kFunction, kVector, true>(p, stream)
                             : chooseRows<Act, kFunction, kVector, false>(p, stream);
}

template <class Act, int kFunction>
cudaError_t chooseVector(const ActivationParams& p, cudaStream_t stream) {
  return p.wide ? chooseFactor<Act, kFunction, 8>(p, stream) : chooseFactor<Act, kFunction, 1>(p, stream);
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
