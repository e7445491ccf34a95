// How a problem maps to a launch: a pure function, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include "dispatch.h"
#include "kernel.cuh"

namespace replayssm {

// The chunk that minimises the longest team's work; loading a chunk's keys is priced at kChunkCost heads.
inline int chooseHeadsPerChunk(int rows, int heads, int headsPerGroup, int workers) {
  constexpr double kChunkCost = 0.1;
  int best = 1;
  double bestCost = 0.0;
  for (int size = 1; size <= headsPerGroup; ++size) {
    if (headsPerGroup % size != 0) continue;
    int64_t chunks = static_cast<int64_t>(rows) * (heads / size);
    int64_t rounds = (chunks + workers - 1) / workers;
    double cost = static_cast<double>(rounds) * (size + kChunkCost);
    if (bestCost == 0.0 || cost < bestCost) {
      bestCost = cost;
      best = size;
    }
  }
  return best;
}

template <class Traits>
UpdateLaunch chooseLaunch(const UpdateParams& p) {
  SharedLayout layout = sharedLayout<Traits>(p.window, p.tokens);
  UpdateLaunch launch;
  launch.headsPerChunk =
      chooseHeadsPerChunk(p.rows, p.heads, p.headsPerGroup, p.multiprocessors * Traits::kTeams);
  int64_t chunks = static_cast<int64_t>(p.rows) * (p.heads / launch.headsPerChunk);
  launch.grid = static_cast<int>(chunks < p.multiprocessors ? chunks : p.multiprocessors);
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
  return cudaLaunchKernelEx(&config, kernel, p, launch.headsPerChunk);
}

}  // namespace replayssm
