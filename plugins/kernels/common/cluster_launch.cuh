// A launch in clusters of blocks, otherwise as launch.cuh.
#pragma once

#include <cuda_runtime.h>

namespace replayssm {

// `grid` in clusters of `cluster` blocks, with `sharedBytes` of dynamic shared memory. `programmatic`: the kernel may start
// while its predecessor drains, and must call waitForPredecessor.
template <class Kernel, class... Args>
cudaError_t launchClusters(cudaStream_t stream, bool programmatic, Kernel kernel, dim3 grid, int cluster, int threads,
                           int sharedBytes, const Args&... args) {
  cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sharedBytes);
  if (code != cudaSuccess) return code;
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (programmatic) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(sharedBytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace replayssm
