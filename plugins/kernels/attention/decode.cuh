// Attention of a decode or verify step. Two warps of a block copy keys and values of one item after another; the others
// multiply: they divide an item's query rows, or its keys, whose sums they add at the item's end.
#pragma once

#include "items.cuh"
#include "kernels/common/programmatic.cuh"
#include "tile.cuh"

namespace replayssm {

// kTiles: of 8 query rows, a warp's own. kRowWarps have other rows and the same tiles of keys; kKeyWarps have the same rows
// and every kKeyWarps-th tile of keys.
template <class Act_, int kSize_, int kTiles_, int kRowWarps_, int kKeyWarps_>
struct AttentionTraits {
  using Act = Act_;
  static constexpr int kSize = kSize_, kTiles = kTiles_, kRowWarps = kRowWarps_, kKeyWarps = kKeyWarps_;
  static constexpr int kProducers = 2, kConsumers = kRowWarps * kKeyWarps;
  static constexpr int kConsumerThreads = 32 * kConsumers, kThreads = 32 * (kProducers + kConsumers);
  static constexpr int kWarpRows = 8 * kTiles, kRows = kRowWarps * kWarpRows;
  static constexpr int kPitch = kSize + 4;  // floats of a row of sums: lanes of a store meet in no bank
  // shared memory: queries, the warps' sums and statistics, order of the rows, two items, barriers, rings
  static constexpr int kQueryBytes = kRows * kSize * 2;
  static constexpr int kSumBytes = kKeyWarps * kRows * kPitch * 4, kStatisticBytes = kKeyWarps * kRows * 8;
  static constexpr int kMaxSlots = 32, kBarrierBytes = 8 * (2 + 4 * kMaxSlots);
  static constexpr int kItemBytes = 2 * sizeof(AttentionItem) + 8, kOrderBytes = 2 * kMaxOrderedRows;
  static constexpr int kFixed =
      (kQueryBytes + kSumBytes + kStatisticBytes + kOrderBytes + kItemBytes + kBarrierBytes + 127) / 128 * 128;
  static constexpr int kBlockBytes = 227 << 10;
  static constexpr int kTileBytes = kTileKeys * kSize * 2;
  static constexpr int kFitting = (kBlockBytes - kFixed) / (2 * kTileBytes);
  static constexpr int kSlots = kFitting < kMaxSlots ? kFitting : kMaxSlots;
  static constexpr int kShared = kFixed + 2 * kSlots * kTileBytes;
  static_assert(kSlots >= 4, "a ring covers the latency of the memory");
  using Ring = TileRing<kSize, kSlots>;
  using Tiles = QueryTiles<Act, kSize, kTiles>;
};

// A block's shared memory.
template <class Traits>
struct AttentionShared {
  unsigned char* base;

  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(base + Traits::kQueryBytes);
  }
  __device__ __forceinline__ float2* statistic() const {
    return reinterpret_cast<float2*>(base + Traits::kQueryBytes + Traits::kSumBytes);
  }
  __device__ __forceinline__ uint16_t* order() const {
    return reinterpret_cast<uint16_t*>(statistic() + Traits::kKeyWarps * Traits::kRows);
  }
  // Of items with an even or odd number: one is read while the next one is written.
  __device__ __forceinline__ AttentionItem* item(uint32_t number) const {
    return reinterpret_cast<AttentionItem*>(order() + kMaxOrderedRows) + number % 2;
  }
  __device__ __forceinline__ uint32_t queries() const { return sharedAddress(base); }
  __device__ __forceinline__ uint32_t barriers() const { return sharedAddress(item(0)) + Traits::kItemBytes; }
  __device__ __forceinline__ uint32_t queryFull() const { return barriers(); }
  __device__ __forceinline__ uint32_t queryEmpty() const { return barriers() + 8; }
  __device__ __forceinline__ typename Traits::Ring keys() const {
    return {sharedAddress(base) + Traits::kFixed, barriers() + 16};
  }
  __device__ __forceinline__ typename Traits::Ring values() const {
    return {keys().tiles + Traits::kSlots * Traits::kTileBytes, barriers() + 16 + 16 * Traits::kSlots};
  }
};

// The item's query rows as a tile of rows; those that do not exist are zeros.
template <class Traits>
__device__ __forceinline__ void copyQueries(const AttentionParams& p, const AttentionItem& item, uint32_t to) {
  constexpr int kChunks = Traits::kSize / 8, kPassRows = 32 / kChunks, kHeld = (Traits::kRows + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % kChunks;
  const auto* queries = static_cast<const uint16_t*>(p.q) + item.queryOffset(p);
  int offsets[kHeld];  // of rows `lane` and `lane` + 32; -1: does not exist
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const QueryRow row(p, item.kvHead, item.firstRow + lane + 32 * i);
    offsets[i] = row.token < item.numTokens ? row.offset : -1;
  }
#pragma unroll
  for (int i = 0; i < Traits::kRows / kPassRows; ++i) {
    const int row = i * kPassRows + lane / kChunks;
    const int offset = __shfl_sync(0xffffffffu, offsets[i * kPassRows / 32], row % 32);
    const bool exists = offset >= 0 && 8 * chunk < p.size;
    copyPiece(to + tilePlace<Traits::kSize>(row, chunk), queries + (exists ? offset + 8 * chunk : 0), exists);
  }
}

// The warp that copies keys, and with each item its queries and what it is. item: the block's first.
template <class Traits>
__device__ __forceinline__ void produceKeys(const AttentionParams& p, const AttentionShared<Traits>& shared,
                                            const uint16_t* order, int items, AttentionItem item) {
  TileCopies<typename Traits::Ring> copies{shared.keys(), 0};
  for (int number = 0, index = 0; index >= 0; ++number) {
    if (number > 0) barrierWait(shared.queryEmpty(), (number - 1) & 1);
    copyQueries<Traits>(p, item, shared.queries());
    loadsArrive(shared.queryFull());
    if (threadIdx.x % 32 == 0) {
      *shared.item(number) = item;
      barrierArrive(shared.queryFull());
    }
    copies.copy(static_cast<const uint16_t*>(p.keys) + item.cacheOffset(p), p.size, item.begin, item.end);
    index = dealtItem(number + 1, items);
    if (index >= 0) item = attentionItem<Traits::kRows>(p, order, index);
  }
  loadsDrain();
}

template <class Traits>
__device__ __forceinline__ void produceValues(const AttentionParams& p, const AttentionShared<Traits>& shared,
                                              const uint16_t* order, int items, AttentionItem item) {
  TileCopies<typename Traits::Ring> copies{shared.values(), 0};
  for (int number = 0, index = 0; index >= 0; ++number) {
    copies.copy(static_cast<const uint16_t*>(p.values) + item.cacheOffset(p), p.size, item.begin, item.end);
    index = dealtItem(number + 1, items);
    if (index >= 0) item = attentionItem<Traits::kRows>(p, order, index);
  }
  loadsDrain();
}

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

// Scores of a tile that begins at `position`, without those of keys that a query does not see.
template <class Traits>
__device__ __forceinline__ void maskScores(const AttentionParams& p, const AttentionItem& item, int rowWarp, int position,
                                           float (&s)[Traits::kTiles][4]) {
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
    tiles.loadQueries(shared.queries() + rowWarp * Traits::kWarpRows * Traits::kSize * 2);
    tiles.clear();
    const uint32_t count = static_cast<uint32_t>(item.end - begin + kTileKeys - 1) / kTileKeys;
    __syncwarp();
    if (thread % 32 == 0) barrierArrive(shared.queryEmpty());
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
  if (threadIdx.x < 32) {
    shared.keys().init(Traits::kRowWarps);
    shared.values().init(Traits::kRowWarps);
  }
  if (threadIdx.x == 0) {
    barrierInit(shared.queryFull(), 33);
    barrierInit(shared.queryEmpty(), Traits::kConsumers);
  }
  __syncthreads();
  releaseDependents();
  waitForPredecessor();
  // the place of the item as most batches deal it is under way while the rows are looked at
  AttentionItem item = attentionItem<Traits::kRows>(p, nullptr, static_cast<int>(blockIdx.x));
  auto* const room = reinterpret_cast<int*>(memory + Traits::kFixed);  // where keys will lie
  const uint16_t* order = orderRows<Traits::kThreads>(p, items, room, shared.order()) ? shared.order() : nullptr;
  if (order != nullptr) item = attentionItem<Traits::kRows>(p, order, static_cast<int>(blockIdx.x));
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp == 0) {
    produceKeys(p, shared, order, items, item);
  } else if (warp == 1) {
    produceValues(p, shared, order, items, item);
  } else {
    consume(p, shared, items);
  }
}

}  // namespace replayssm
