// The launch of the sum over ranks, by activation type.
#include "kernels/common/launch.cuh"
#include "sum_ranks.cuh"

namespace replayssm {

cudaError_t launchSumRanks(const SumRanksParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.rows));
  const int threads = (p.size / kSumVector + 31) / 32 * 32;
  const auto kernel = p.float16 ? sumRanksKernel<__half> : sumRanksKernel<__nv_bfloat16>;
  return launchOn(stream, p.programmaticLaunch, kernel, grid, threads, p);
}

}  // namespace replayssm
