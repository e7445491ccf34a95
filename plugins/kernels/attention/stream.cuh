// The stream of keys and values of a block: tiles of some positions, which producer warps copy into rings of shared
// memory and warps that multiply take out, over the whole of the block's items without a stop between them.
//
// A tile is panels of 64 channels, one after another; a panel has its rows one after another, and 16-byte chunk q of
// row r lies at place q ^ (r % 8) of the row: neither the copies (a row a time) nor the matrix loads (eight rows a
// time) meet in a bank, and the instructions of a warpgroup know it as their swizzle of 128 bytes.
#pragma once

#include <cstdint>

#include "kernels/common/warp_arrival.cuh"

namespace replayssm {

constexpr int kPanelRowBytes = 128;

// Bytes from the start of a tile of kRows rows to chunk `chunk` of row `row`.
template <int kRows>
__device__ __forceinline__ int tilePlace(int row, int chunk) {
  return chunk / 8 * (kRows * kPanelRowBytes) + row * kPanelRowBytes + (((chunk ^ row) & 7) << 4);
}

// One ring of kSlots tiles of kKeys positions. full: a tile has landed; empty: its readers are done. Tile number s of
// the block is in slot s % kSlots.
template <int kSize_, int kKeys_, int kSlots_>
struct TileRing {
  static_assert(kSlots_ <= 32, "a lane initialises a slot");
  static constexpr int kSize = kSize_, kKeys = kKeys_, kSlots = kSlots_, kTileBytes = kKeys * kSize * 2;

  uint32_t tiles, barriers;  // shared addresses: of the first tile; of full[kSlots], empty[kSlots]

  // By the lanes of one warp.
  __device__ __forceinline__ void init(uint32_t readers) const {
    const uint32_t slot = threadIdx.x % 32;
    if (slot >= kSlots) return;
    barrierInit(full(slot), 32);
    barrierInit(empty(slot), readers);
  }
  __device__ __forceinline__ uint32_t full(uint32_t slot) const { return barriers + 8 * slot; }
  __device__ __forceinline__ uint32_t empty(uint32_t slot) const { return barriers + 8 * (kSlots + slot); }

  // Shared address of tile number s, once it has landed.
  __device__ __forceinline__ uint32_t take(uint32_t s) const {
    const uint32_t slot = s % kSlots;
    barrierWait(full(slot), s / kSlots & 1);
    return tiles + slot * kTileBytes;
  }
  // All lanes of a warp have read tile number s.
  __device__ __forceinline__ void release(uint32_t s) const {
    __syncwarp();
    if (kEveryLaneArrives || threadIdx.x % 32 == 0) barrierArrive(empty(s % kSlots));
  }
};

// Sixteen bytes, or zeros where they do not exist.
__device__ __forceinline__ void copyPiece(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}

// A producer's place in its ring: the number of the next tile.
template <class Ring>
struct TileCopies {
  static constexpr int kChunks = Ring::kSize / 8, kKeys = Ring::kKeys;
  static constexpr int kPassRows = 32 / kChunks, kPasses = kKeys / kPassRows;

  Ring ring;
  uint32_t next;

  // Copy positions [begin, end) of `cache`, which begins at position 0; rows of `size` channels.
  __device__ __forceinline__ void copy(const uint16_t* cache, int size, int begin, int end) {
    const int lane = static_cast<int>(threadIdx.x) % 32, chunk = lane % kChunks, first = lane / kChunks;
    const bool inside = 8 * chunk < size;
    const int64_t step = static_cast<int64_t>(kPassRows) * size;
    const uint16_t* from = cache + static_cast<int64_t>(begin + first) * size + (inside ? 8 * chunk : 0);
    for (int position = begin; position < end; position += kKeys, ++next) {
      const uint32_t slot = next % Ring::kSlots;
      const uint32_t to = ring.tiles + slot * Ring::kTileBytes + tilePlace<kKeys>(first, chunk);
      if (next >= Ring::kSlots) barrierWait(ring.empty(slot), (next / Ring::kSlots - 1) & 1);
      if (position + kKeys <= end) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i, from += step) copyPiece(passPlace(to, i), from, inside);
      } else {
#pragma unroll
        for (int i = 0; i < kPasses; ++i, from += step) {
          const bool exists = inside && position + i * kPassRows + first < end;
          copyPiece(passPlace(to, i), exists ? from : cache, exists);
        }
      }
      loadsArrive(ring.full(slot));
    }
  }

  // The address of a lane's chunk in pass i from that in the first one.
  static __device__ __forceinline__ uint32_t passPlace(uint32_t first, int i) {
    return (first ^ (i * kPassRows % 8) << 4) + i * kPassRows * kPanelRowBytes;
  }
};

}  // namespace replayssm
