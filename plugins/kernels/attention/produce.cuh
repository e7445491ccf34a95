// The two warps of a block that copy: keys, queries and what an item is; values.
#pragma once

#include "layout.cuh"

namespace replayssm {

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
    copyPiece(to + tilePlace<Traits::kRows>(row, chunk), queries + (exists ? offset + 8 * chunk : 0), exists);
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

}  // namespace replayssm
