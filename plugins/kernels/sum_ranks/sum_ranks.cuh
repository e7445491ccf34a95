// The sum of rows over ranks, the residual sum and RMSNorm. One block a row, 8 channels a thread, held in registers.
// HAZARD: a block waits for the same block of its peers. Blocks start in the order of their index on every device, so of
// those that have not ended the first is running everywhere, and ends.
#pragma once

#include "inbox.cuh"
#include "kernels/common/programmatic.cuh"
#include "kernels/common/row_sum.cuh"
#include "kernels/common/vector.cuh"

namespace replayssm {

template <class Act>
__device__ __forceinline__ void addTo(float (&total)[kSumVector], uint4 word) {
  float values[kSumVector];
  unpack<Act>(word, values);
#pragma unroll
  for (int v = 0; v < kSumVector; ++v) total[v] += values[v];
}

template <class Act>
__global__ void __launch_bounds__(kMaxSumThreads) sumRanksKernel(const __grid_constant__ SumRanksParams p) {
  __shared__ float shared[kMaxSumThreads / 32];
  const int channel = static_cast<int>(threadIdx.x) * kSumVector;
  const bool inside = channel < p.size;
  const int64_t row = blockIdx.x;
  releaseDependents();
  float weight[kSumVector] = {};
  if (inside && p.weight != nullptr) normWeight(weight, p.weight + channel, p.weightOffset);
  waitForPredecessor();
  const auto at = [&](const void* base, int64_t stride) {
    return reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + row * stride + channel);
  };
  const uint32_t turn = p.turn[row];
  // where rank `from` pushes into the inbox of `to`
  const auto place = [&](int to, int from) {
    const int64_t line = (static_cast<int64_t>(turn % 2) * p.ranks + from) * p.capacity + row;
    return reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.inbox[to]) + line * p.size + channel);
  };
  const uint4 own = sendable(loadIf(inside, at(p.x, p.xStride)));
  if (inside) {
    for (int rank = 0; rank < p.ranks; ++rank) {
      if (rank != p.rank) push(place(rank, p.rank), own);
    }
  }
  const uint4 residual = loadIf(inside && p.residual != nullptr, at(p.residual, p.residualStride));
  float total[kSumVector] = {};
  for (int rank = 0; rank < p.ranks; ++rank) {
    addTo<Act>(total, rank == p.rank || !inside ? own : take(place(p.rank, rank), p));
  }
  if (p.residual != nullptr) addTo<Act>(total, residual);
  const uint4 rounded = pack<Act>(total);
  if (inside) *const_cast<uint4*>(at(p.sum, p.sumStride)) = rounded;
  unpack<Act>(rounded, total);
  float square = 0.0f;
#pragma unroll
  for (int v = 0; v < kSumVector; ++v) square = fmaf(total[v], total[v], square);
  const float mean = blockSum(square, shared) / static_cast<float>(p.size);
  if (threadIdx.x == 0) p.turn[row] = turn + 1;  // all threads have read it: blockSum holds a barrier
  if (!inside || p.out == nullptr) return;
  const float scale = rsqrtf(mean + p.eps);
#pragma unroll
  for (int v = 0; v < kSumVector; ++v) total[v] = total[v] * scale * weight[v];
  *const_cast<uint4*>(at(p.out, p.outStride)) = pack<Act>(total);
}

}  // namespace replayssm
