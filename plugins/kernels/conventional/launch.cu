// Launch choice and launches of the conventional step and of the recovery step.
#include "../common/launch.cuh"
#include "kernel.cuh"

namespace replayssm {
namespace {

constexpr int64_t kSmallBytes = 64 << 10;  // of state a multiprocessor
// State rows of a warp: small batches, plain and GDN's steps, several tokens of Mamba-2.
constexpr int kSmallRows = 4, kPlainRows = 8, kManyRows = 16;

template <class Kernel, class Params>
cudaError_t launchKernel(Kernel kernel, const Params& p, const ConventionalLaunch& launch, cudaStream_t stream) {
  return launchOn(stream, p.programmaticLaunch, kernel, dim3(static_cast<unsigned>(launch.grid)), 32 * launch.warps, p);
}

// Only what chooseConventional picks is compiled.
template <class Act, bool kGdn>
cudaError_t launchFamily(const ConventionalParams& p, cudaStream_t stream) {
  using Small = Block<Act, kGdn, kSmallRows>;
  using Plain = Block<Act, kGdn, kPlainRows>;
  using Many = Block<Act, kGdn, kGdn ? kPlainRows : kManyRows>;
  const ConventionalLaunch launch = chooseConventional(p);
  if (p.tokens > 1) return launchKernel(conventionalKernel<WideRows, Many, false>, p, launch, stream);
  if (launch.stateRows == kSmallRows) {
    return launchKernel(conventionalKernel<NarrowRows, Small, true>, p, launch, stream);
  }
  return launchKernel(conventionalKernel<WideRows, Plain, true>, p, launch, stream);
}

template <bool kGdn>
cudaError_t launchFamily(const RecoveryParams& p, cudaStream_t stream) {
  using Act = __nv_bfloat16;
  const ConventionalLaunch launch = chooseConventional(p);
  switch (launch.stateRows) {
    case kSmallRows:
      return launchKernel(recoveryKernel<NarrowRows, Block<Act, kGdn, kSmallRows>>, p, launch, stream);
    case kPlainRows: return launchKernel(recoveryKernel<WideRows, Block<Act, kGdn, kPlainRows>>, p, launch, stream);
    default:
      return launchKernel(recoveryKernel<WideRows, Block<Act, kGdn, kGdn ? kPlainRows : kManyRows>>, p, launch, stream);
  }
}

cudaError_t launchStep(const ConventionalParams& p, cudaStream_t stream) {
  if (p.gdn) return p.half ? launchFamily<__half, true>(p, stream) : launchFamily<__nv_bfloat16, true>(p, stream);
  return p.half ? launchFamily<__half, false>(p, stream) : launchFamily<__nv_bfloat16, false>(p, stream);
}

}  // namespace

ConventionalLaunch chooseConventional(const StepParams& p) {
  ConventionalLaunch launch{kPlainRows, 1, 0};  // many small CTAs hide each other's latencies
  const int64_t stateBytes = static_cast<int64_t>(p.rows) * p.heads * p.headDim * kConventionalStateDim * 4;
  if (p.tokens > 1 && !p.gdn) {
    launch = {kManyRows, 8, 0};  // written more than read: fewer, larger bursts
  } else if (p.tokens <= 1 && stateBytes <= p.multiprocessors * kSmallBytes) {
    launch = {kSmallRows, 4, 0};  // one wave of CTAs: the sooner all loads are on their way, the better
  }
  const int64_t units = static_cast<int64_t>(p.rows) * p.heads * (p.headDim / launch.stateRows);
  launch.grid = static_cast<int>((units + launch.warps - 1) / launch.warps);
  return launch;
}

cudaError_t launchConventional(const ConventionalParams& problem, cudaStream_t stream) {
  ConventionalParams p = problem;
  p.prefetches = p.programmaticLaunch && !p.settled && p.tokens == 1 && chooseConventional(p).stateRows == kSmallRows;
  return launchStep(p, stream);
}

cudaError_t launchRecovery(const RecoveryParams& p, cudaStream_t stream) {
  return p.gdn ? launchFamily<true>(p, stream) : launchFamily<false>(p, stream);
}

}  // namespace replayssm
