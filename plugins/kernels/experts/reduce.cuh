// The sum of a token's weighted expert answers, in the order of its choices, in float32.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"

namespace replayssm {

constexpr int kReduceThreads = 128;
constexpr int kReduceVector = 8;  // channels of a thread

// Blocks: tokens along x, runs of channels along y.
__global__ void __launch_bounds__(kReduceThreads) reduceKernel(const __grid_constant__ ReduceParams p) {
  using Word = Packed<kReduceVector>;
  const int token = static_cast<int>(blockIdx.x);
  const int channel = (static_cast<int>(blockIdx.y) * kReduceThreads + static_cast<int>(threadIdx.x)) * kReduceVector;
  __shared__ int32_t places[kMaxChoices];
  waitForPredecessor();
  if (static_cast<int>(threadIdx.x) < p.topK) {
    places[threadIdx.x] = p.position[static_cast<int64_t>(token) * p.topK + threadIdx.x];
  }
  __syncthreads();
  if (channel >= p.channels) return;
  const auto* rows = static_cast<const uint16_t*>(p.rows);
  float sum[kReduceVector] = {};
#pragma unroll 8
  for (int i = 0; i < p.topK; ++i) {
    const int64_t place = places[i];
    const Word word = loadIf(place >= 0, reinterpret_cast<const Word*>(rows + place * p.channels + channel));
    float values[kReduceVector];
    unpack<__nv_bfloat16>(word, values);
#pragma unroll
    for (int v = 0; v < kReduceVector; ++v) sum[v] += values[v];
  }
  auto* out = static_cast<uint16_t*>(p.out) + token * p.outStride + channel;
  *reinterpret_cast<Word*>(out) = pack<__nv_bfloat16>(sum);
}

}  // namespace replayssm
