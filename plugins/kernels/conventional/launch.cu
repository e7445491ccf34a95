// Launch choice and launch of the conventional step.
#include "kernel.cuh"

namespace replayssm {
namespace {

template <class Act, bool kGdn, int kRows>
cudaError_t launchRows(const ConventionalParams& p, const ConventionalLaunch& launch, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.grid));
  config.blockDim = dim3(static_cast<unsigned>(32 * launch.warps));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = p.programmaticLaunch ? 1 : 0;
  return cudaLaunchKernelEx(&config, conventionalKernel<Act, kGdn, kRows>, p);
}

template <class Act, bool kGdn>
cudaError_t launchFamily(const ConventionalParams& p, const ConventionalLaunch& launch, cudaStream_t stream) {
  switch (launch.stateRows) {
    case 4: return launchRows<Act, kGdn, 4>(p, launch, stream);
    case 8: return launchRows<Act, kGdn, 8>(p, launch, stream);
    default: return launchRows<Act, kGdn, 16>(p, launch, stream);
  }
}

}  // namespace

ConventionalLaunch chooseConventional(const ConventionalParams& p) {
  ConventionalLaunch launch{};
  launch.stateRows = 8;
  launch.warps = 4;
  const int64_t units = static_cast<int64_t>(p.rows) * p.heads * (p.headDim / launch.stateRows);
  launch.grid = static_cast<int>((units + launch.warps - 1) / launch.warps);
  return launch;
}

cudaError_t launchConventional(const ConventionalParams& p, cudaStream_t stream) {
  const ConventionalLaunch launch = chooseConventional(p);
  if (p.gdn) {
    return p.half ? launchFamily<__half, true>(p, launch, stream) : launchFamily<__nv_bfloat16, true>(p, launch, stream);
  }
  return p.half ? launchFamily<__half, false>(p, launch, stream) : launchFamily<__nv_bfloat16, false>(p, launch, stream);
}

}  // namespace replayssm
