// How a problem maps to a launch: a pure function, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "dispatch.h"
#include "kernel.cuh"

namespace replayssm {

template <class Traits>
UpdateLaunch chooseLaunch(const UpdateParams& p) {
  SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  UpdateLaunch launch;
  int64_t items = static_cast<int64_t>(p.rows) * p.heads;
  int64_t teams = static_cast<int64_t>(p.multiprocessors) * Traits::kTeams;
  launch.workers = static_cast<int>(items < teams ? items : teams);
  launch.grid = static_cast<int>(items < p.multiprocessors ? items : p.multiprocessors);
  launch.sharedBytes = layout.teamBytes * Traits::kTeams;
  launch.stages = layout.stages * Traits::kTeams;
  return launch;
}

template <class Traits>
cudaError_t launchMamba2Update(const UpdateParams& p, cudaStream_t stream) {
  UpdateLaunch launch = chooseLaunch<Traits>(p);
  auto kernel = mamba2UpdateKernel<Traits>;
  cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.sharedBytes);
  if (code != cudaSuccess) return code;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(launch.grid);
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = launch.sharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = p.programmaticLaunch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p, launch.workers);
}

}  // namespace replayssm
