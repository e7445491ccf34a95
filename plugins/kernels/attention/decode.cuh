// Attention of a decode or verify step. Two warps of a block copy keys and values of one item after another; the
// others multiply: they divide an item's query rows, or its keys, whose sums they add at the item's end.
#pragma once

#include "begin.cuh"
#include "produce.cuh"
#include "results.cuh"

namespace replayssm {

// Scores of a tile that begins at `position`, without those of keys that a query does not see.
template <class Traits>
__device__ __forceinline__ void maskScores(const AttentionParams& p, const AttentionItem& item, int rowWarp,
                                           int position, float (&s)[Traits::kTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, c = lane % 4;
#pragma unroll
  for (int t = 0; t < Traits::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int index = item.firstRow + rowWarp * Traits::kWarpRows + 8 * t + 2 * c + i;
      const int token = QueryRow(p, item.kvHead, index).token;
      const int last = token < item.numTokens ? min(item.start + token, item.end - 1) : -1;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (position + g + 8 * h > last) s[t][2 * h + i] = -CUDART_INF_F;
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void consume(const AttentionParams& p, const AttentionShared<Traits>& shared, int items) {
  const int thread = static_cast<int>(threadIdx.x) - 32 * Traits::kProducers, warp = thread / 32;
  const int rowWarp = warp % Traits::kRowWarps, keyWarp = warp / Traits::kRowWarps;
  const auto keys = shared.keys(), values = shared.values();
  uint32_t first = 0;  // number of the item's first tile
  typename Traits::Tiles tiles;
  for (int number = 0; dealtItem(number, items) >= 0; ++number) {
    barrierWait(shared.queryFull(), number & 1);
    const AttentionItem& item = *shared.item(number);
    const int begin = item.begin, start = item.start;
    tiles.template loadQueries<Traits::kRows>(shared.queries() + rowWarp * Traits::kWarpRows * kPanelRowBytes);
    tiles.clear();
    const uint32_t count = static_cast<uint32_t>(item.end - begin + kTileKeys - 1) / kTileKeys;
    __syncwarp();
    if (kEveryLaneArrives || thread % 32 == 0) barrierArrive(shared.queryEmpty());
    for (uint32_t tile = static_cast<uint32_t>(keyWarp); tile < count; tile += Traits::kKeyWarps) {
      const int position = begin + static_cast<int>(tile) * kTileKeys;
      float s[Traits::kTiles][4];
      tiles.scores(keys.take(first + tile), p.scale, s);
      keys.release(first + tile);
      if (position + kTileKeys > start + 1) maskScores<Traits>(p, item, rowWarp, position, s);
      tiles.rescale(s);
      tiles.accumulate(values.take(first + tile), s);
      values.release(first + tile);
    }
    first += count;
    tiles.finish();
    consumersBarrier<Traits>();  // the sums of the item before have been read
    shareSums(shared, tiles, keyWarp, rowWarp);
    consumersBarrier<Traits>();
    writeRows(p, item, shared, thread);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attentionKernel(const __grid_constant__ AttentionParams p, int items) {
  extern __shared__ __align__(128) unsigned char memory[];
  const AttentionShared<Traits> shared{memory};
  beginBlock(p, shared, items, [&](const uint16_t* order, const AttentionItem& item) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0) {
      produceKeys(p, shared, order, items, item);
    } else if (warp == 1) {
      produceValues(p, shared, order, items, item);
    } else {
      consume(p, shared, items);
    }
  });
}

}  // namespace replayssm
