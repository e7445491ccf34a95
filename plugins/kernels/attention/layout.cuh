// How a block of the attention divides its shared memory, and its work over warps.
#pragma once

#include "items.cuh"
#include "tile.cuh"

namespace replayssm {

// A block's shared memory: queries, rings of keys and values, the warps' sums and statistics, order of the rows, two
// items, barriers.
//
// kRows: of queries. kKeys: positions of a tile. kConsumers: warps that multiply, of which kReaders read each tile and
// leave kSumRows rows of sums together. kOrderedRows: of the largest batch that is put in order. kBlocks: of a
// multiprocessor.
template <int kSize_, int kRows_, int kKeys_, int kConsumers_, int kReaders_, int kSumRows_, int kOrderedRows_,
          int kBlocks_>
struct AttentionRoom {
  static constexpr int kSize = kSize_, kRows = kRows_, kKeys = kKeys_, kReaders = kReaders_, kBlocks = kBlocks_;
  static constexpr int kProducers = 2, kConsumers = kConsumers_;
  static constexpr int kConsumerThreads = 32 * kConsumers, kThreads = 32 * (kProducers + kConsumers);
  static constexpr int kOrderedRows = kOrderedRows_;
  static constexpr int kPitch = kSize + 4;  // floats of a row of sums: lanes of a store meet in no bank
  static constexpr int kQueryBytes = kRows * kSize * 2;
  static constexpr int kSumBytes = kSumRows_ * kPitch * 4, kStatisticBytes = kSumRows_ * 8;
  static constexpr int kItemBytes = 2 * sizeof(AttentionItem) + 8, kOrderBytes = 2 * kOrderedRows;
  static constexpr int kTileBytes = kKeys * kSize * 2, kReserved = 1 << 10;  // of a block, by the system
  static constexpr int kBlockBytes = (228 << 10) / kBlocks - kReserved;
  static constexpr int kRest = kQueryBytes + kSumBytes + kStatisticBytes + kOrderBytes + kItemBytes + 8 * 2;
  static constexpr int kSlotBytes = 2 * (kTileBytes + 8 * 2);  // a tile of keys, one of values, their barriers
  static constexpr int kFitting = (kBlockBytes - kRest) / kSlotBytes, kMaxSlots = 32;
  static constexpr int kSlots = kFitting < kMaxSlots ? kFitting : kMaxSlots;
  static constexpr int kShared = kRest + kSlots * kSlotBytes;
  using Ring = TileRing<kSize, kKeys, kSlots>;
};

// kTiles: of 8 query rows, a warp's own. kRowWarps have other rows and the same tiles of keys; kKeyWarps have the
// same rows and every kKeyWarps-th tile of keys.
template <class Act_, int kSize_, int kTiles_, int kRowWarps_, int kKeyWarps_>
struct AttentionTraits
    : AttentionRoom<kSize_, kRowWarps_ * 8 * kTiles_, kTileKeys, kRowWarps_ * kKeyWarps_, kRowWarps_,
                    kKeyWarps_ * kRowWarps_ * 8 * kTiles_, 1024, 1> {
  using Act = Act_;
  static constexpr int kTiles = kTiles_, kRowWarps = kRowWarps_, kKeyWarps = kKeyWarps_, kWarpRows = 8 * kTiles;
  static_assert(AttentionTraits::kSlots >= 4, "a ring covers the latency of the memory");
  using Tiles = QueryTiles<Act, kSize_, kTiles>;
};

template <class Traits>
struct AttentionShared {
  unsigned char* base;

  __device__ __forceinline__ uint32_t queries() const { return sharedAddress(base); }
  // Where tiles will lie, before there are any.
  __device__ __forceinline__ int* room() const { return reinterpret_cast<int*>(base + Traits::kQueryBytes); }
  __device__ __forceinline__ float* sums() const {
    return reinterpret_cast<float*>(base + Traits::kQueryBytes + 2 * Traits::kSlots * Traits::kTileBytes);
  }
  __device__ __forceinline__ float2* statistic() const {
    return reinterpret_cast<float2*>(reinterpret_cast<unsigned char*>(sums()) + Traits::kSumBytes);
  }
  __device__ __forceinline__ uint16_t* order() const {
    return reinterpret_cast<uint16_t*>(reinterpret_cast<unsigned char*>(statistic()) + Traits::kStatisticBytes);
  }
  // Of items with an even or odd number: one is read while the next one is written.
  __device__ __forceinline__ AttentionItem* item(uint32_t number) const {
    return reinterpret_cast<AttentionItem*>(order() + Traits::kOrderedRows) + number % 2;
  }
  __device__ __forceinline__ uint32_t barriers() const { return sharedAddress(item(0)) + Traits::kItemBytes; }
  __device__ __forceinline__ uint32_t queryFull() const { return barriers(); }
  __device__ __forceinline__ uint32_t queryEmpty() const { return barriers() + 8; }
  __device__ __forceinline__ typename Traits::Ring keys() const {
    return {sharedAddress(base) + Traits::kQueryBytes, barriers() + 16};
  }
  __device__ __forceinline__ typename Traits::Ring values() const {
    return {keys().tiles + Traits::kSlots * Traits::kTileBytes, barriers() + 16 + 16 * Traits::kSlots};
  }
};

}  // namespace replayssm
