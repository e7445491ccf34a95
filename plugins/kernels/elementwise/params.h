// Norm and activation as the ABI layer sees them: plain data, checked there; strides in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

struct RmsNormParams {
  int64_t rows;
  int32_t size;
  int32_t parts;  // float32 ones that x is the sum of; 0: x is of the activation type
  float eps, weightOffset;
  bool float16;  // activations; else bfloat16
  bool wide;     // rows are whole aligned pieces of 8 channels
  bool programmaticLaunch;

  const void* x;
  const void* residual;  // null: none
  const float* weight;
  void* sum;
  void* out;
  int64_t xStride, residualStride, sumStride, outStride;  // of a row
  int64_t partStride;
};

struct ActivationParams {
  int64_t rows;
  int32_t groups, size;
  int32_t multiprocessors;
  int32_t function;  // RSSM_SILU ...
  bool float16;
  bool wide;  // as above
  bool programmaticLaunch;

  const void* x;
  const void* factor;    // null: 1
  const float* opening;  // of a row; null: none
  void* out;
  int64_t xStride, xGroupStride, factorStride, factorGroupStride, openingStride, outStride, outGroupStride;
};

cudaError_t launchRmsNorm(const RmsNormParams& p, cudaStream_t stream);
cudaError_t launchActivation(const ActivationParams& p, cudaStream_t stream);

}  // namespace replayssm
