// The sum of a token's weighted expert answers, in the order of its choices, in float32.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"

namespace replayssm {

constexpr int kReduceThreads = 128;
constexpr int kReduceVector = 8;  // channels of a thread
constexpr int kReduceBatch = 12;  // answers that it loads at once
// Of a multiprocessor, at least. HAZARD: where this is not said, the compiler saves registers for more of them and adds
// answers between the loads, which then wait for each other.
constexpr int kReduceBlocks = 4;

// Blocks: tokens along x, runs of channels along y.
__global__ void __launch_bounds__(kReduceThreads, kReduceBlocks) reduceKernel(const __grid_constant__ ReduceParams p) {
  using Word = Packed<kReduceVector>;
  const int token = static_cast<int>(blockIdx.x);
  const int channel = (static_cast<int>(blockIdx.y) * kReduceThreads + static_cast<int>(threadIdx.x)) * kReduceVector;
  __shared__ int32_t places[kMaxChoices + kReduceBatch];
  static_assert(kMaxChoices + kReduceBatch <= kReduceThreads, "a thread a place");
  // HAZARD: the plan is there, as the second product began after it was complete; its answers are not.
  const int choice = static_cast<int>(threadIdx.x);
  if (choice < kMaxChoices + kReduceBatch) {
    places[choice] = choice < p.topK ? __ldcg(p.position + static_cast<int64_t>(token) * p.topK + choice) : -1;
  }
  __syncthreads();
  waitForPredecessor();
  if (channel >= p.channels) return;
  const auto* rows = static_cast<const uint16_t*>(p.rows);
  float sum[kReduceVector] = {};
  for (int base = 0; base < p.topK; base += kReduceBatch) {
    Word words[kReduceBatch];
#pragma unroll
    for (int i = 0; i < kReduceBatch; ++i) {
      const int64_t place = places[base + i];
      words[i] = loadIf(place >= 0, reinterpret_cast<const Word*>(rows + place * p.channels + channel));
    }
#pragma unroll
    for (int i = 0; i < kReduceBatch; ++i) {
      float values[kReduceVector];
      unpack<__nv_bfloat16>(words[i], values);
#pragma unroll
      for (int v = 0; v < kReduceVector; ++v) sum[v] += values[v];
    }
  }
  auto* out = static_cast<uint16_t*>(p.out) + token * p.outStride + channel;
  *reinterpret_cast<Word*>(out) = pack<__nv_bfloat16>(sum);
}

}  // namespace replayssm
