// One stage by the instructions of a warpgroup: the weights of a sub-step become operands while those of the sub-step
// before are being multiplied.
#pragma once

#include "kernels/common/mbarrier.cuh"
#include "traits.cuh"
#include "warpgroup.cuh"

namespace replayssm {

template <class T, int kRows, int kTiles>
__device__ __forceinline__ void multiplyAsync(float (&sum)[T::kWarpTiles][kTiles][4], const uint32_t (&a)[kRows][2][4],
                                              uint32_t tokens, int sub) {
  warpgroupFence();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint64_t columns = coreDescriptor(tokens + (2 * sub + k) * 2 * kCoreBytes, 8 * T::kTokenBytes);
#pragma unroll
    for (int i = 0; i < kRows; ++i) warpgroupMma(sum[i], a[i][k], columns);
  }
  warpgroupCommit();
}

// The first kRows tiles of every warp times all tokens.
template <class T, int kRows, int kTiles>
__device__ __forceinline__ void consumeWide(float (&sum)[T::kWarpTiles][kTiles][4], uint32_t stage) {
  using Format = typename T::Format;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t tokens = stage + T::kWeightBytes;
  const uint32_t pieces = stage + warp * T::kTileBytes + lane * 16;
  const uint32_t scales = stage + T::kElementBytes + warp * T::kScaleTileBytes + lane * 4;
  asyncProxyFence();  // the tokens were copied by ordinary stores
  Format tile[kRows];
  uint32_t a[2][kRows][2][4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    tile[i].loadFirst(pieces + i * T::kWarps * T::kTileBytes, scales + i * T::kWarps * T::kScaleTileBytes);
    tile[i].template operands<0>(a[0][i]);
  }
  multiplyAsync<T, kRows, kTiles>(sum, a[0], tokens, 0);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if constexpr (Format::kStepColumns == 64) tile[i].loadSecond(pieces + i * T::kWarps * T::kTileBytes);
    tile[i].template operands<1>(a[1][i]);
  }
  multiplyAsync<T, kRows, kTiles>(sum, a[1], tokens, 1);
  if constexpr (Format::kStepColumns == 128) {
    warpgroupWait<1>();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      tile[i].loadSecond(pieces + i * T::kWarps * T::kTileBytes);
      tile[i].template operands<2>(a[0][i]);
    }
    multiplyAsync<T, kRows, kTiles>(sum, a[0], tokens, 2);
    warpgroupWait<1>();
#pragma unroll
    for (int i = 0; i < kRows; ++i) tile[i].template operands<3>(a[1][i]);
    multiplyAsync<T, kRows, kTiles>(sum, a[1], tokens, 3);
  }
  warpgroupWait<0>();
}

}  // namespace replayssm
