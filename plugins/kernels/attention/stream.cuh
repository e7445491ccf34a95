// A stream of keys and values, 16 positions a tile. Every lane uses exactly the 16-byte pieces that lanes of its number
// copy, so shared memory serves as more registers: no layout to swizzle, and nothing to synchronise for a warp that has
// a stream of its own. Warps with other query rows may share one, each copying its part of the pieces.
//
// With g = lane / 4 and c = lane % 4, the pieces of a tile are
//   keys:   position 8 n + g, channels 32 j + 8 c ..+7, for n = 0, 1 and each j: operand B of q k^T, column g
//   values: positions 2c, 2c+1, 2c+8, 2c+9, channels 64 j + 8 g ..+7: operand B of p v, columns 8 g + i for product i
#pragma once

#include <cstdint>

namespace replayssm {

constexpr int kTileKeys = 16;

// kSize: channels of a head, rounded up to a multiple of 64. kWarps: that share the stream.
template <int kSize, int kStages_, int kWarps>
struct KvStream {
  static constexpr int kStages = kStages_;
  static constexpr int kKeyChunks = kSize / 32, kValueBlocks = kSize / 64;
  static constexpr int kKeyPieces = 2 * kKeyChunks, kPieces = kKeyPieces + 4 * kValueBlocks;
  static constexpr int kBytes = kStages * kPieces * 32 * 16;

  const uint16_t* keys;    // of the slot and head, position 0
  const uint16_t* values;
  uint4* ring;
  int size, end;           // channels that exist; positions from here on are zeros
  int warp, lane;          // warp: 0..kWarps-1

  __device__ __forceinline__ uint4* at(int stage, int piece) const {
    return ring + (stage * kPieces + piece) * 32 + lane;
  }

  // A lane's pieces of a key are halves of a line: the L2 cache fetches whole ones.
  __device__ __forceinline__ void copy(uint4* to, const uint16_t* base, int position, int channel) const {
    const bool exists = position < end && channel < size;
    const uint16_t* from = base + (exists ? position * size + channel : 0);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
  }

  // Start to copy this warp's pieces of the tile that begins at `position`.
  __device__ __forceinline__ void fetch(int stage, int position) const {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < kKeyChunks; ++j) {
        if (j % kWarps != warp) continue;
        copy(at(stage, n * kKeyChunks + j), keys, position + 8 * n + g, 32 * j + 8 * c);
      }
    }
#pragma unroll
    for (int j = 0; j < kValueBlocks; ++j) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k % kWarps != warp) continue;
        copy(at(stage, kKeyPieces + 4 * j + k), values, position + 2 * c + k % 2 + 8 * (k / 2), 64 * j + 8 * g);
      }
    }
  }

  static __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  // Until at most kStages - 2 younger tiles are under way. Then also no warp of a shared stream uses an older one.
  static __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    if constexpr (kWarps > 1) __syncthreads();
  }
};

}  // namespace replayssm
