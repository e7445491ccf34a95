// Products of passes of few tokens out of the ring of many (deep.cuh) by mma.m16n8k16, every warp for itself: it waits
// for no other, and its instructions leave the units of logic to the others. README.md has what it takes.
#pragma once

#include "deep_producer.cuh"
#include "kernels/common/mma.cuh"

namespace replayssm {

// Of 8 tokens by 32 columns, four cores: a lane's operands of two instructions.
__device__ __forceinline__ uint4 tokenFragments(uint32_t cores) {
  uint4 word;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "r"(cores));
  return word;
}

// 32 columns of a warp's tiles times all tokens; `cores`: this lane's 16 bytes of the first of them.
template <class T, int kSub, int kRows, int kTiles>
__device__ __forceinline__ void syncUnit(float (&sum)[kRows][kTiles][4], const typename T::Format (&tile)[kRows],
                                         uint32_t cores) {
  uint32_t a[kRows][2][4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) tile[i].template operands<kSub>(a[i]);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const uint4 b = tokenFragments(cores + n * 8 * T::kColumnBytes + kSub * 4 * kCoreBytes);
#pragma unroll
    for (int i = 0; i < kRows; ++i) mmaAct<__nv_bfloat16>(sum[i][n], a[i][0], b.x, b.y);
#pragma unroll
    for (int i = 0; i < kRows; ++i) mmaAct<__nv_bfloat16>(sum[i][n], a[i][1], b.z, b.w);
  }
}

// What a warp multiplies of a stage: kRows tiles.
template <class T, int kRows, int kTiles>
__device__ __forceinline__ void syncStage(float (&sum)[kRows][kTiles][4], uint32_t stage) {
  const int lane = laneAnew(), slot = kRows * warpAnew();
  const uint32_t pieces = stage + slot * T::kTileBytes + lane * 16;
  const uint32_t scales = stage + T::kElementBytes + slot * T::kScaleTileBytes + lane * 4;
  const uint32_t cores = stage + T::kTokens + lane * 16;
  typename T::Format tile[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) tile[i].loadFirst(pieces + i * T::kTileBytes, scales + i * T::kScaleTileBytes);
  syncUnit<T, 0>(sum, tile, cores);
  if constexpr (T::kSubs == 4) syncUnit<T, 1>(sum, tile, cores);
#pragma unroll
  for (int i = 0; i < kRows; ++i) tile[i].loadSecond(pieces + i * T::kTileBytes);
  if constexpr (T::kSubs == 4) {
    syncUnit<T, 2>(sum, tile, cores);
    syncUnit<T, 3>(sum, tile, cores);
  } else {
    syncUnit<T, 1>(sum, tile, cores);
  }
}

}  // namespace replayssm
