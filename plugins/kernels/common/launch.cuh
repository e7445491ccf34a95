// One way to launch a kernel on a stream, optionally with programmatic stream serialisation.
#pragma once

#include <cuda_runtime.h>

namespace replayssm {

// `programmatic`: the kernel may start while its predecessor drains, and must call waitForPredecessor.
// sharedBytes: of dynamic shared memory; the kernel's limit is the caller's to raise.
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

// The same without dynamic shared memory.
template <class Kernel, class... Args>
cudaError_t launchOn(cudaStream_t stream, bool programmatic, Kernel kernel, dim3 grid, int threads,
                     const Args&... args) {
  return launchShared(stream, programmatic, kernel, grid, threads, 0, args...);
}

}  // namespace replayssm
