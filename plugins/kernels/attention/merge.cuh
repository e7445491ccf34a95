// The parts of split keys put together: one warp a query head of one token, 8 channels a lane.
#pragma once

#include <math_constants.h>

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"
#include "rows.cuh"

namespace replayssm {

constexpr int kMergeWarps = 4;

// Blocks: heads of a token along x, tokens along y, rows along z.
template <class Act>
__global__ void __launch_bounds__(32 * kMergeWarps) mergeKernel(const __grid_constant__ AttentionParams p) {
  const int head = static_cast<int>(blockIdx.x) * kMergeWarps + static_cast<int>(threadIdx.x) / 32;
  const int token = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
  const int channel = static_cast<int>(threadIdx.x) % 32 * 8;
  releaseDependents();
  waitForPredecessor();
  if (head >= p.heads || channel >= p.size) return;
  const int group = p.heads / p.kvHeads, rows = p.tokens * group;
  const bool exists = token < existingTokens(p, row);
  const int64_t first = (static_cast<int64_t>(row) * p.kvHeads + head / group) * p.splits * rows + token * group +
                        head % group;
  float top = -CUDART_INF_F, total = 0.0f, x[8] = {};
  const int splits = exists ? p.splits : 0;
  const float2* statistics = p.statistic + first;
  const float* partial = p.partial + first * p.size + channel;
  for (int split = 0; split < splits; ++split) top = fmaxf(top, statistics[split * rows].x);
  for (int split = 0; split < splits; ++split) {
    const float2 statistic = statistics[split * rows];
    if (statistic.y == 0.0f) continue;  // sees nothing
    const float factor = exp2f(statistic.x - top);
    const auto* from = reinterpret_cast<const float4*>(partial + static_cast<int64_t>(split) * rows * p.size);
    const float4 low = from[0], high = from[1];
    total += factor * statistic.y;
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int v = 0; v < 8; ++v) x[v] = fmaf(factor, values[v], x[v]);
  }
#pragma unroll
  for (int v = 0; v < 8; ++v) x[v] = exists ? x[v] / total : 0.0f;
  const int64_t place = ((static_cast<int64_t>(row) * p.tokens + token) * p.heads + head) * p.size + channel;
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + place) = pack<Act>(x);
}

}  // namespace replayssm
