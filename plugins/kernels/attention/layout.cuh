// How a block of the attention divides its work over warps and its shared memory.
#pragma once

#include "items.cuh"
#include "tile.cuh"

namespace replayssm {

// kTiles: of 8 query rows, a warp's own. kRowWarps have other rows and the same tiles of keys; kKeyWarps have the
// same rows and every kKeyWarps-th tile of keys.
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

}  // namespace replayssm
