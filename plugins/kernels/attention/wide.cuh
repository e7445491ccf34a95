// Attention of a verify step, or of large groups: many query rows of a key head, by the instructions of a warpgroup
// (sm_90a). Two warps of a block copy as in decode.cuh; a warpgroup multiplies 64 query rows, whether they exist or not,
// with 64 keys at once: nothing is added up over warps, and the multiplier's time does not depend on the rows.
#pragma once

#include <math_constants.h>

#include "begin.cuh"
#include "kernels/common/vector.cuh"
#include "produce.cuh"
#include "wide_mma.cuh"

namespace replayssm {

// Heads of up to 128 channels leave room for two blocks: one multiplies while the other one ends an item.
template <class Act_, int kSize_>
struct WideTraits
    : AttentionRoom<kSize_, kWideRows, kWideKeys, 4, 4, 0, (kSize_ > 128 ? 1024 : 384), (kSize_ > 128 ? 1 : 2)> {
  using Act = Act_;
  static_assert(WideTraits::kSlots >= 3, "a tile is read, two are on their way");
};

// What a lane keeps of an item. With g = lane / 4 and c = lane % 4: rows g + 8 h of its warp's sixteen.
template <class Act, int kSize>
struct WideSums {
  float sum[kSize / 8][4];  // channels 8 n + 2 c + i of row g + 8 h in element [n][2 h + i]
  float maximum[2], weight[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) sum[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      maximum[h] = -CUDART_INF_F;
      weight[h] = 0.0f;
    }
  }

  // Scores (key 8 n + 2 c + i of row g + 8 h in [n][2 h + i]) become weights relative to the maximum that is kept, packed as
  // operands; where that moves, the sums follow it.
  __device__ __forceinline__ void rescale(float (&s)[8][4], float scale, uint32_t (&p)[4][4]) {
    float factor[2];
    bool moves = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -CUDART_INF_F;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& score = s[i / 2][2 * h + i % 2];
        score *= scale;
        top = fmaxf(top, score);
      }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
      const float before = maximum[h];
      moves |= keepMaximum(maximum[h], top);
      const float base = finiteMaximum(maximum[h]);
      factor[h] = exp2Fast(before - base);
      float total = 0.0f;  // of this lane's keys
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& score = s[i / 2][2 * h + i % 2];
        score = exp2Fast(score - base);
        total += score;
      }
      weight[h] = fmaf(weight[h], factor[h], total);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) p[i / 4][i % 4] = packPair<Act>(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
    if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) sum[i / 4][i % 4] *= factor[i % 4 / 2];
    }
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) weight[h] += __shfl_xor_sync(0xffffffffu, weight[h], step);
    }
  }
};

// What lies in shared memory and registers is what products read from here on.
__device__ __forceinline__ void beginProducts() {
  asyncProxyFence();
  warpgroupFence();
}

// The products of a tile of keys, under way.
template <class Act, int kSize>
__device__ __forceinline__ void startScores(float (&s)[8][4], uint32_t queries, uint32_t keys) {
#pragma unroll
  for (int j = 0; j < kSize / 16; ++j) {
    const uint32_t place = j / 4 * kPanelBytes + j % 4 * 32;
    scoresMma<Act>(s, rowsOperand(queries + place), rowsOperand(keys + place), j > 0);
  }
  warpgroupCommit();
}

template <class Act, int kSize>
__device__ __forceinline__ void startSums(WideSums<Act, kSize>& sums, const uint32_t (&p)[4][4], uint32_t values) {
#pragma unroll
  for (int i = 0; i < 4; ++i) valuesMma<Act>(sums.sum, p[i], turnedOperand(values + 16 * i * kPanelRowBytes));
  warpgroupCommit();
}

// Scores of keys that a row does not see. last: position of the last one that it sees.
__device__ __forceinline__ void maskWide(float (&s)[8][4], int position, const int (&last)[2]) {
  const int c = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (position + i / 4 * 8 + 2 * c + i % 2 > last[i % 4 / 2]) s[i / 4][i % 4] = -CUDART_INF_F;
  }
}

// A lane's channels of a row as it writes them: lanes trade with their neighbours, so that four of them write 32 bytes
// together. first: of the four that a lane writes of channels 16 m .. 16 m + 15.
__device__ __forceinline__ int firstChannel(int m) {
  const int c = static_cast<int>(threadIdx.x) % 4;
  return 16 * m + 8 * (c % 2) + 2 * (c & ~1);
}

// The output of row `index` of an item.
template <class Act, int kSize>
__device__ __forceinline__ void writeOutput(const AttentionParams& p, const AttentionItem& item, int index, int h,
                                            const WideSums<Act, kSize>& sums) {
  const QueryRow row(p, item.kvHead, index);
  const bool odd = threadIdx.x % 2 == 1, exists = row.token < item.numTokens;
  const bool written = index < p.tokens * (p.heads / p.kvHeads);
  const float inverse = exists ? 1.0f / sums.weight[h] : 0.0f;
  auto* const to = static_cast<uint16_t*>(p.out) + item.queryOffset(p) + row.offset;
#pragma unroll
  for (int m = 0; m < kSize / 16; ++m) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float even = sums.sum[2 * m][2 * h + i] * inverse, other = sums.sum[2 * m + 1][2 * h + i] * inverse;
      const float traded = __shfl_xor_sync(0xffffffffu, odd ? even : other, 1);
      x[i] = odd ? traded : even;
      x[2 + i] = odd ? other : traded;
    }
    const int channel = firstChannel(m);
    if (written && channel < p.size) *reinterpret_cast<uint2*>(to + channel) = pack<Act>(x);
  }
}

// Sums and statistics of a part of the keys, of row `index` of an item.
template <class Act, int kSize>
__device__ __forceinline__ void writePart(const AttentionParams& p, const AttentionItem& item, int index, int h,
                                          const WideSums<Act, kSize>& sums) {
  const int c = static_cast<int>(threadIdx.x) % 4, queryRows = p.tokens * (p.heads / p.kvHeads);
  if (index >= queryRows) return;
  const int64_t part =
      ((static_cast<int64_t>(item.row) * p.kvHeads + item.kvHead) * p.splits + item.split) * queryRows + index;
#pragma unroll
  for (int n = 0; n < kSize / 8; ++n) {
    const int channel = 8 * n + 2 * c;
    if (channel >= p.size) break;
    *reinterpret_cast<float2*>(p.partial + part * p.size + channel) = {sums.sum[n][2 * h], sums.sum[n][2 * h + 1]};
  }
  if (c == 0) p.statistic[part] = {sums.maximum[h], sums.weight[h]};
}

// A warp of the warpgroup, whose rows begin with `firstRow` of an item's.
template <class Traits>
__device__ __forceinline__ void consumeWide(const AttentionParams& p, const AttentionShared<Traits>& shared, int items) {
  using Act = typename Traits::Act;
  constexpr int kSize = Traits::kSize;
  const int lane = static_cast<int>(threadIdx.x) % 32, row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  const int queryRows = p.tokens * (p.heads / p.kvHeads);
  const auto keys = shared.keys(), values = shared.values();
  uint32_t next = 0;  // number of the tile
  for (int number = 0; dealtItem(number, items) >= 0; ++number) {
    barrierWait(shared.queryFull(), number & 1);
    const AttentionItem item = *shared.item(number);
    const bool some = item.firstRow + row - lane / 4 < queryRows;  // of the warp's rows exist
    int last[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = QueryRow(p, item.kvHead, item.firstRow + row + 8 * h).token;
      last[h] = token < item.numTokens ? min(item.start + token, item.end - 1) : -1;
    }
    WideSums<Act, kSize> sums;
    sums.clear();
    if (item.end > item.begin) {
      float s[8][4];
      uint32_t weights[4][4] = {};  // zero for rows that no query has
      int position = item.begin;
      const auto weigh = [&] {
        if (!some) return;
        if (position + kWideKeys > min(item.start + 1, item.end)) maskWide(s, position, last);
        sums.rescale(s, p.scale, weights);
      };
      const uint32_t first = keys.take(next);
      beginProducts();
      startScores<Act, kSize>(s, shared.queries(), first);
      warpgroupWait<0>();
      holdSums(s);
      keys.release(next);
      for (; position + kWideKeys < item.end; position += kWideKeys, ++next) {
        weigh();
        const uint32_t own = values.take(next), following = keys.take(next + 1);
        beginProducts();
        startSums(sums, weights, own);
        startScores<Act, kSize>(s, shared.queries(), following);
        warpgroupWait<0>();
        holdSums(sums.sum);
        holdSums(s);
        values.release(next);
        keys.release(next + 1);
      }
      weigh();
      const uint32_t own = values.take(next);
      beginProducts();
      startSums(sums, weights, own);
      warpgroupWait<0>();
      holdSums(sums.sum);
      values.release(next++);
    }
    __syncwarp();
    if (kEveryLaneArrives || lane == 0) barrierArrive(shared.queryEmpty());
    if (!some) continue;
    sums.finish();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (p.splits == 1) {
        writeOutput(p, item, item.firstRow + row + 8 * h, h, sums);
      } else {
        writePart(p, item, item.firstRow + row + 8 * h, h, sums);
      }
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    wideAttentionKernel(const __grid_constant__ AttentionParams p, int items) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const AttentionShared<Traits> shared{memory};
  beginBlock(p, shared, items, [&](const uint16_t* order, const AttentionItem& item) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp < Traits::kConsumers) {
      consumeWide(p, shared, items);
    } else if (warp == Traits::kConsumers) {
      produceKeys(p, shared, order, items, item);
    } else {
      produceValues(p, shared, order, items, item);
    }
  });
}

}  // namespace replayssm
