// The end of an item: the consumers' sums put together and written.
#pragma once

#include "layout.cuh"

namespace replayssm {

template <class Traits>
__device__ __forceinline__ void consumersBarrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(Traits::kConsumerThreads) : "memory");
}

// The warp's sums and statistics, relative to its own maximum, into shared memory.
template <class Traits>
__device__ __forceinline__ void shareSums(const AttentionShared<Traits>& shared, const typename Traits::Tiles& tiles,
                                          int keyWarp, int rowWarp) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, c = lane % 4;
#pragma unroll
  for (int t = 0; t < Traits::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = keyWarp * Traits::kRows + rowWarp * Traits::kWarpRows + 8 * t + 2 * c + i;
      if (g == 0) shared.statistic()[r] = {tiles.maximum[t][i], tiles.weight[t][i]};
      float* to = shared.sums() + r * Traits::kPitch + g;
#pragma unroll
      for (int j = 0; j < Traits::Tiles::kSteps; ++j) {
        to[16 * j] = tiles.sum[t][j][i];
        to[16 * j + 8] = tiles.sum[t][j][2 + i];
      }
    }
  }
}

// Eight channels of a row over the warps, and the row's statistics.
template <class Traits>
__device__ __forceinline__ float2 sumOfWarps(const AttentionShared<Traits>& shared, int r, int channel, float (&x)[8]) {
  float2 each[Traits::kKeyWarps], common{-CUDART_INF_F, 0.0f};
#pragma unroll
  for (int w = 0; w < Traits::kKeyWarps; ++w) {
    each[w] = shared.statistic()[w * Traits::kRows + r];
    common.x = fmaxf(common.x, each[w].x);
  }
  const float base = common.x == -CUDART_INF_F ? 0.0f : common.x;
#pragma unroll
  for (int v = 0; v < 8; ++v) x[v] = 0.0f;
#pragma unroll
  for (int w = 0; w < Traits::kKeyWarps; ++w) {
    const float factor = exp2f(each[w].x - base);
    common.y += factor * each[w].y;
    const auto* from =
        reinterpret_cast<const float4*>(shared.sums() + (w * Traits::kRows + r) * Traits::kPitch + channel);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 four = from[i];
      x[4 * i] = fmaf(factor, four.x, x[4 * i]);
      x[4 * i + 1] = fmaf(factor, four.y, x[4 * i + 1]);
      x[4 * i + 2] = fmaf(factor, four.z, x[4 * i + 2]);
      x[4 * i + 3] = fmaf(factor, four.w, x[4 * i + 3]);
    }
  }
  return common;
}

// Results of the item's rows: the output, or the part's sums and statistics.
template <class Traits>
__device__ __forceinline__ void writeRows(const AttentionParams& p, const AttentionItem& item,
                                          const AttentionShared<Traits>& shared, int thread) {
  constexpr int kChunks = Traits::kSize / 8;
  const int queryRows = p.tokens * (p.heads / p.kvHeads), channel = thread % kChunks * 8;
  if (channel >= p.size) return;
  for (int r = thread / kChunks; r < Traits::kRows; r += Traits::kConsumerThreads / kChunks) {
    const int index = item.firstRow + r;
    if (index >= queryRows) break;
    float x[8];
    const float2 common = sumOfWarps(shared, r, channel, x);
    if (p.splits == 1) {
      const QueryRow row(p, item.kvHead, index);
      const float inverse = 1.0f / common.y;
#pragma unroll
      for (int v = 0; v < 8; ++v) x[v] = row.token < item.numTokens ? x[v] * inverse : 0.0f;
      auto* to = static_cast<uint16_t*>(p.out) + item.queryOffset(p) + row.offset + channel;
      *reinterpret_cast<uint4*>(to) = pack<typename Traits::Act>(x);
      continue;
    }
    const int64_t part =
        ((static_cast<int64_t>(item.row) * p.kvHeads + item.kvHead) * p.splits + item.split) * queryRows + index;
    auto* to = reinterpret_cast<float4*>(p.partial + part * p.size + channel);
    to[0] = {x[0], x[1], x[2], x[3]};
    to[1] = {x[4], x[5], x[6], x[7]};
    if (channel == 0) p.statistic[part] = common;
  }
}

}  // namespace replayssm
