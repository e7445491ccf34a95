// Activations and their products, elementwise over rows of groups of channels, a row times one sigmoid.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"
#include "replayssm/elementwise.h"

namespace replayssm {

constexpr int kActivationThreads = 256;

// To a few float32 steps; callers round the result to 16 bits.
__device__ __forceinline__ float sigmoidFast(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

template <int kFunction>
__device__ __forceinline__ float activated(float x) {
  if constexpr (kFunction == RSSM_SILU) return siluFast(x);
  if constexpr (kFunction == RSSM_SIGMOID) return sigmoidFast(x);
  return squaredRelu(x);
}

// kVector channels a thread; blocks along x over the channels of all groups, rows along y and z.
template <class Act, int kFunction, int kVector>
__global__ void __launch_bounds__(kActivationThreads) activationKernel(const __grid_constant__ ActivationParams p) {
  using Word = Packed<kVector>;
  releaseDependents();
  const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const int flat = static_cast<int>(blockIdx.x * kActivationThreads + threadIdx.x) * kVector;  // < 2^24 + a block
  const int group = flat / p.size, channel = flat - group * p.size;
  waitForPredecessor();
  if (row >= p.rows || group >= p.groups) return;
  const auto at = [&](const void* base, int64_t stride, int64_t groupStride) {
    return reinterpret_cast<const Word*>(static_cast<const uint16_t*>(base) + row * stride + group * groupStride +
                                         channel);
  };
  const Word word = loadIf(true, at(p.x, p.xStride, p.xGroupStride));
  float x[kVector];
  unpack<Act>(word, x);
#pragma unroll
  for (int v = 0; v < kVector; ++v) x[v] = activated<kFunction>(x[v]);
  if (p.factor != nullptr) {
    float factor[kVector];
    unpack<Act>(loadIf(true, at(p.factor, p.factorStride, p.factorGroupStride)), factor);
#pragma unroll
    for (int v = 0; v < kVector; ++v) x[v] *= factor[v];
  }
  if (p.opening != nullptr) {
    const float share = sigmoidFast(p.opening[row * p.openingStride]);
#pragma unroll
    for (int v = 0; v < kVector; ++v) x[v] *= share;
  }
  *const_cast<Word*>(at(p.out, p.outStride, p.outGroupStride)) = pack<Act>(x);
}

}  // namespace replayssm
