// One way to launch a kernel on a stream, optionally with programmatic stream serialisation.
#pragma once

#include <cuda_runtime.h>

namespace replayssm {

// `programmatic`: the kernel may start while its predecessor drains, and must call waitForPredecessor.
template <class Kernel, class... Args>
cudaError_t launchOn(cudaStream_t stream, bool programmatic, Kernel kernel, dim3 grid, int threads,
                     const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace replayssm
