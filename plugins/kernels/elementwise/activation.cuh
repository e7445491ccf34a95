// Activations and their products, elementwise over rows of groups of channels, a row times one sigmoid.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"
#include "replayssm/elementwise.h"

namespace replayssm {

constexpr int kMaxActivationThreads = 512;  // of a block

// exp(-x) to a few float32 steps; zero below 2^-126, which a sum with one does not show: without __expf's care for such
// results, with the same bits of sigmoid and SiLU.
__device__ __forceinline__ float expMinus(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * -1.4426950408889634f));
  return result;
}

// To a few float32 steps; callers round the result to 16 bits.
__device__ __forceinline__ float sigmoidFast(float x) { return __fdividef(1.0f, 1.0f + expMinus(x)); }

template <int kFunction>
__device__ __forceinline__ float activated(float x) {
  if constexpr (kFunction == RSSM_SILU) return __fdividef(x, 1.0f + expMinus(x));
  if constexpr (kFunction == RSSM_SIGMOID) return sigmoidFast(x);
  return squaredRelu(x);
}

// kVector channels of kRows rows a thread, all loaded at once; blocks along x over the channels of all groups, along y
// and z over runs of rows. kFactor: there is one.
template <class Act, int kFunction, int kVector, bool kFactor, int kRows>
__global__ void __launch_bounds__(kMaxActivationThreads, 3)
    activationKernel(const __grid_constant__ ActivationParams p) {
  using Word = Packed<kVector>;
  releaseDependents();
  const int flat = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * kVector;  // < 2^24 + a block
  const int group = flat / p.size, channel = flat - group * p.size;
  const int64_t first = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * kRows;
  const bool inside = group < p.groups;
  const auto at = [&](const void* base, int64_t stride, int64_t groupStride, int r) {
    return reinterpret_cast<const Word*>(static_cast<const uint16_t*>(base) + (first + r) * stride +
                                         group * groupStride + channel);
  };
  Word words[kRows], factors[kRows];
  float openings[kRows];
  waitForPredecessor();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool wanted = inside && first + r < p.rows;
    words[r] = loadIf(wanted, at(p.x, p.xStride, p.xGroupStride, r));
    if constexpr (kFactor) factors[r] = loadIf(wanted, at(p.factor, p.factorStride, p.factorGroupStride, r));
    openings[r] = loadIf(wanted && p.opening != nullptr, p.opening + (first + r) * p.openingStride);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float x[kVector], factor[kVector];
    unpack<Act>(words[r], x);
    if constexpr (kFactor) unpack<Act>(factors[r], factor);
    const float share = sigmoidFast(openings[r]);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      x[v] = activated<kFunction>(x[v]);
      if constexpr (kFactor) x[v] *= factor[v];
      if (p.opening != nullptr) x[v] *= share;
    }
    if (inside && first + r < p.rows) {
      storeWord(const_cast<Word*>(at(p.out, p.outStride, p.outGroupStride, r)), pack<Act>(x));
    }
  }
}

}  // namespace replayssm
