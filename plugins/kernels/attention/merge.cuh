// The parts of split keys put together: one block a query head of one token, 8 channels a lane, parts over the warps.
#pragma once

#include <math_constants.h>

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"
#include "rows.cuh"

namespace replayssm {

constexpr int kMergeWarps = 4;
constexpr int kMaxSplits = 64;  // two a lane

// Blocks: heads along x, tokens along y, rows along z.
template <class Act>
__global__ void __launch_bounds__(32 * kMergeWarps) mergeKernel(const __grid_constant__ AttentionParams p) {
  __shared__ float4 shared[kMergeWarps][2][32];
  const int head = static_cast<int>(blockIdx.x), token = static_cast<int>(blockIdx.y);
  const int row = static_cast<int>(blockIdx.z);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const bool inside = 8 * lane < p.size;
  releaseDependents();
  waitForPredecessor();
  const int group = p.heads / p.kvHeads, rows = p.tokens * group;
  const int64_t first = (static_cast<int64_t>(row) * p.kvHeads + head / group) * p.splits * rows + token * group +
                        head % group;
  // a part that sees nothing, or a token that does not exist: maximum -inf, weights and sums 0
  float2 own[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int split = lane + 32 * i;
    own[i] = split < p.splits ? p.statistic[first + split * rows] : float2{-CUDART_INF_F, 0.0f};
  }
  float top = fmaxf(own[0].x, own[1].x);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
  const float base = top == -CUDART_INF_F ? 0.0f : top;
  const float factors[2] = {exp2f(own[0].x - base), exp2f(own[1].x - base)};
  float total = factors[0] * own[0].y + factors[1] * own[1].y;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
  float4 low{}, high{};
#pragma unroll 4
  for (int split = warp; split < p.splits; split += kMergeWarps) {
    const float factor = __shfl_sync(0xffffffffu, split < 32 ? factors[0] : factors[1], split % 32);
    if (!inside) continue;
    const auto* from = reinterpret_cast<const float4*>(p.partial + (first + split * rows) * p.size + 8 * lane);
    const float4 a = from[0], b = from[1];
    low = {fmaf(factor, a.x, low.x), fmaf(factor, a.y, low.y), fmaf(factor, a.z, low.z), fmaf(factor, a.w, low.w)};
    high = {fmaf(factor, b.x, high.x), fmaf(factor, b.y, high.y), fmaf(factor, b.z, high.z), fmaf(factor, b.w, high.w)};
  }
  shared[warp][0][lane] = low;
  shared[warp][1][lane] = high;
  __syncthreads();
  if (warp > 0 || !inside) return;
  float x[8] = {};
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 four = shared[w][i][lane];
      x[4 * i] += four.x;
      x[4 * i + 1] += four.y;
      x[4 * i + 2] += four.z;
      x[4 * i + 3] += four.w;
    }
  }
  const bool exists = token < existingTokens(p, row);
#pragma unroll
  for (int v = 0; v < 8; ++v) x[v] = exists ? x[v] / total : 0.0f;
  const int64_t place = ((static_cast<int64_t>(row) * p.tokens + token) * p.heads + head) * p.size + 8 * lane;
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + place) = pack<Act>(x);
}

}  // namespace replayssm
