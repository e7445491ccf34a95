// One way to launch a kernel on a stream, optionally with programmatic stream serialisation.
#pragma once

#include <cuda_runtime.h>

namespace replayssm {

// With `sharedBytes` of dynamic shared memory, of which the kernel has been allowed that many. `programmatic`: the kernel
// may start while its predecessor drains, and must call waitForPredecessor.
template <class Kernel, class... Args>
cudaError_t launchShared(cudaStream_t stream, bool programmatic, Kernel kernel, dim3 grid, int threads,
                         int sharedBytes, const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(sharedBytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

template <class Kernel, class... Args>
cudaError_t launchOn(cudaStream_t stream, bool programmatic, Kernel kernel, dim3 grid, int threads,
                     const Args&... args) {
  return launchShared(stream, programmatic, kernel, grid, threads, 0, args...);
}

// The same for a kernel that may take more than the usual 48 KiB.
template <class Kernel, class... Args>
cudaError_t launchLarge(cudaStream_t stream, bool programmatic, Kernel kernel, dim3 grid, int threads, int sharedBytes,
                        const Args&... args) {
  cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sharedBytes);
  if (code != cudaSuccess) return code;
  return launchShared(stream, programmatic, kernel, grid, threads, sharedBytes, args...);
}

}  // namespace replayssm
