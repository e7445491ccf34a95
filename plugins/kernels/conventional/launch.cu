// Launch choice and launches of the conventional step and of the recovery step.
#include "kernel.cuh"

namespace replayssm {
namespace {

constexpr int64_t kSmallBytes = 64 << 10;  // of state a multiprocessor

template <class Kernel, class Params>
cudaError_t launchKernel(Kernel kernel, const Params& p, const ConventionalLaunch& launch, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.grid));
  config.blockDim = dim3(static_cast<unsigned>(32 * launch.warps));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = p.programmaticLaunch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <class Act, bool kGdn, int kRows>
cudaError_t launchRows(const ConventionalParams& p, const ConventionalLaunch& launch, cudaStream_t stream) {
  if (p.tokens == 1) return launchKernel(conventionalKernel<Act, kGdn, kRows, true>, p, launch, stream);
  return launchKernel(conventionalKernel<Act, kGdn, kRows, false>, p, launch, stream);
}

template <class Act, bool kGdn, int kRows>
cudaError_t launchRows(const RecoveryParams& p, const ConventionalLaunch& launch, cudaStream_t stream) {
  return launchKernel(recoveryKernel<Act, kGdn, kRows>, p, launch, stream);
}

template <class Act, bool kGdn, class Params>
cudaError_t launchFamily(const Params& p, cudaStream_t stream) {
  const ConventionalLaunch launch = chooseConventional(p);
  switch (launch.stateRows) {
    case 4: return launchRows<Act, kGdn, 4>(p, launch, stream);
    case 8: return launchRows<Act, kGdn, 8>(p, launch, stream);
    default: return launchRows<Act, kGdn, 16>(p, launch, stream);
  }
}

template <class Params>
cudaError_t launchStep(const Params& p, cudaStream_t stream) {
  if (p.gdn) return p.half ? launchFamily<__half, true>(p, stream) : launchFamily<__nv_bfloat16, true>(p, stream);
  return p.half ? launchFamily<__half, false>(p, stream) : launchFamily<__nv_bfloat16, false>(p, stream);
}

}  // namespace

ConventionalLaunch chooseConventional(const StepParams& p) {
  ConventionalLaunch launch{8, 1, 0};  // plain steps: as many small CTAs as fit hide each other's latencies
  const int64_t stateBytes = static_cast<int64_t>(p.rows) * p.heads * p.headDim * kConventionalStateDim * 4;
  if (p.tokens > 1) {
    launch = {16, 8, 0};  // written more than read: fewer, larger bursts
  } else if (stateBytes <= p.multiprocessors * kSmallBytes) {
    launch = {4, 4, 0};  // one wave of CTAs: the sooner all loads are on their way, the better
  }
  const int64_t units = static_cast<int64_t>(p.rows) * p.heads * (p.headDim / launch.stateRows);
  launch.grid = static_cast<int>((units + launch.warps - 1) / launch.warps);
  return launch;
}

cudaError_t launchConventional(const ConventionalParams& p, cudaStream_t stream) { return launchStep(p, stream); }

cudaError_t launchRecovery(const RecoveryParams& p, cudaStream_t stream) { return launchStep(p, stream); }

}  // namespace replayssm
