// The gated group norm as the ABI layer sees it: plain data, checked there; strides in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

struct GatedNormParams {
  int64_t places;                // B * T
  int32_t tokens, groups, size;  // T (1 where B and T lie evenly in memory), groups, channels of a group
  int32_t multiprocessors;
  bool gateFirst;
  float eps;
  bool float16;  // activations; else bfloat16
  bool wide;     // groups are whole pieces of 8 channels, and all pieces are aligned
  bool programmaticLaunch;

  const void* x;
  int64_t xRowStride, xTokenStride;
  const void* gate;
  int64_t gateRowStride, gateTokenStride;
  const float* weight;
  void* out;
  int64_t outRowStride, outTokenStride;
};

cudaError_t launchGatedNorm(const GatedNormParams& p, cudaStream_t stream);

}  // namespace replayssm
