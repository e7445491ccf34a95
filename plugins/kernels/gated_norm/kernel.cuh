// Group RMSNorm with a SiLU gate. A team of kLanes lanes of one warp owns a group of channels of one token; the order of
// the sum depends on the group's size alone, so a token's bits do not depend on the batch.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"

namespace replayssm {

constexpr int kNormThreads = 128;

// One token's group: where its channels start.
struct NormItem {
  const uint16_t* x;
  const uint16_t* gate;
  uint16_t* out;
  const float* weight;

  __device__ __forceinline__ NormItem(const GatedNormParams& p, int64_t item) {
    const int group = static_cast<int>(item % p.groups);
    const int64_t place = item / p.groups;
    const int64_t row = place / p.tokens, token = place % p.tokens;
    const int64_t first = static_cast<int64_t>(group) * p.size;
    x = static_cast<const uint16_t*>(p.x) + row * p.xRowStride + token * p.xTokenStride + first;
    gate = static_cast<const uint16_t*>(p.gate) + row * p.gateRowStride + token * p.gateTokenStride + first;
    out = static_cast<uint16_t*>(p.out) + row * p.outRowStride + token * p.outTokenStride + first;
    weight = p.weight + (p.gateFirst ? first : 0);
  }
};

__device__ __forceinline__ void loadWeights(const float* weight, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 four = reinterpret_cast<const float4*>(weight)[i];
    values[4 * i] = four.x;
    values[4 * i + 1] = four.y;
    values[4 * i + 2] = four.z;
    values[4 * i + 3] = four.w;
  }
}

template <int kLanes>
__device__ __forceinline__ float teamSum(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step, kLanes);
  return value;
}

// Groups of up to kPasses * kLanes * 8 channels, held in registers.
template <class Act, int kLanes, int kPasses>
__global__ void __launch_bounds__(kNormThreads) gatedNormKernel(const __grid_constant__ GatedNormParams p) {
  constexpr int kVector = 8;
  using Word = Packed<kVector>;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kNormThreads / kLanes) + threadIdx.x / kLanes;
  const bool live = item < p.items;  // idle teams stay for the shuffles of their warp
  const NormItem at(p, live ? item : 0);
  releaseDependents();
  float weight[kPasses][kVector];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int channel = (pass * kLanes + lane) * kVector;
    if (channel < p.size) loadWeights(at.weight + channel, weight[pass]);
  }
  waitForPredecessor();
  float x[kPasses][kVector];
  Word gate[kPasses];
  float sum = 0.0f;
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int channel = (pass * kLanes + lane) * kVector;
    const bool inside = live && channel < p.size;
    const Word word = inside ? *reinterpret_cast<const Word*>(at.x + channel) : Word{};
    gate[pass] = inside ? *reinterpret_cast<const Word*>(at.gate + channel) : Word{};
    unpack<Act>(word, x[pass]);
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    float opening[kVector];
    unpack<Act>(gate[pass], opening);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (p.gateFirst) x[pass][v] *= siluFast(opening[v]);
      sum = fmaf(x[pass][v], x[pass][v], sum);
    }
  }
  const float scale = rsqrtf(teamSum<kLanes>(sum) / static_cast<float>(p.size) + p.eps);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int channel = (pass * kLanes + lane) * kVector;
    if (!live || channel >= p.size) break;
    float opening[kVector];
    unpack<Act>(gate[pass], opening);
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      x[pass][v] = x[pass][v] * scale * weight[pass][v];
      if (!p.gateFirst) x[pass][v] *= siluFast(opening[v]);
    }
    *reinterpret_cast<Word*>(at.out + channel) = pack<Act>(x[pass]);
  }
}

// Groups of any size and alignment: one warp a group, single channels, inputs read twice.
template <class Act>
__global__ void __launch_bounds__(kNormThreads) anyGatedNormKernel(const __grid_constant__ GatedNormParams p) {
  using A = Activation<Act>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kNormThreads / 32) + threadIdx.x / 32;
  if (item >= p.items) return;
  const NormItem at(p, item);
  releaseDependents();
  waitForPredecessor();
  float sum = 0.0f;
  for (int channel = lane; channel < p.size; channel += 32) {
    float x = A::toFloat(at.x[channel]);
    if (p.gateFirst) x *= siluFast(A::toFloat(at.gate[channel]));
    sum = fmaf(x, x, sum);
  }
  const float scale = rsqrtf(teamSum<32>(sum) / static_cast<float>(p.size) + p.eps);
  for (int channel = lane; channel < p.size; channel += 32) {
    const float x = A::toFloat(at.x[channel]), opening = siluFast(A::toFloat(at.gate[channel]));
    const float weight = at.weight[channel];
    at.out[channel] = A::fromFloat(p.gateFirst ? x * opening * scale * weight : x * scale * weight * opening);
  }
}

}  // namespace replayssm
