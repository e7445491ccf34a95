// Grouped products of few tokens with packed weights, the weight as the 16-row operand: out[token] = W_e in[token] for
// every pass (expert, up to 64 of its tokens) of a plan.
//
// The last warps of a block fill a ring in shared memory (producer.cuh): of each step, a block of columns, the weights of
// a round's tiles and the same columns of the tokens. The other warps multiply two tiles of 16 rows each with all tokens,
// column block by column block, and store the products at the end of a round.
#pragma once

#include "kernels/common/mma.cuh"
#include "kernels/common/vector.cuh"
#include "producer.cuh"

namespace replayssm {

// Two instructions deep: 32 columns of the step times all tokens.
template <class T, int kSub, int kRows, int kTiles>
__device__ __forceinline__ void subStep(float (&sum)[T::kWarpTiles][kTiles][4],
                                        const typename T::Format (&tile)[kRows], uint32_t tokens) {
  uint32_t a[kRows][2][4];
#pragma unroll
  for (int i = 0; i < kRows; ++i) tile[i].template operands<kSub>(a[i]);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const uint4 b = sharedPiece(tokens + n * 8 * T::kTokenBytes + kSub / 2 * 128 + kSub % 2 * 16);
#pragma unroll
    for (int i = 0; i < kRows; ++i) mmaAct<__nv_bfloat16>(sum[i][n], a[i][0], b.x, b.y);
#pragma unroll
    for (int i = 0; i < kRows; ++i) mmaAct<__nv_bfloat16>(sum[i][n], a[i][1], b.z, b.w);
  }
}

// One stage: the first kRows tiles of this warp times all tokens.
template <class T, int kRows, int kTiles>
__device__ __forceinline__ void consume(float (&sum)[T::kWarpTiles][kTiles][4], uint32_t stage) {
  using Format = typename T::Format;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const uint32_t own = stage + T::kWeightBytes + lane / 4 * T::kTokenBytes + lane % 4 * 32;
  const uint32_t pieces = stage + warp * T::kTileBytes + lane * 16;
  const uint32_t scales = stage + T::kElementBytes + warp * T::kScaleTileBytes + lane * 4;
  Format tile[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    tile[i].loadFirst(pieces + i * T::kWarps * T::kTileBytes, scales + i * T::kWarps * T::kScaleTileBytes);
  }
  subStep<T, 0>(sum, tile, own);
  if constexpr (Format::kStepColumns == 64) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) tile[i].loadSecond(pieces + i * T::kWarps * T::kTileBytes);
  }
  subStep<T, 1>(sum, tile, own);
  if constexpr (Format::kStepColumns == 128) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) tile[i].loadSecond(pieces + i * T::kWarps * T::kTileBytes);
    subStep<T, 2>(sum, tile, own);
    subStep<T, 3>(sum, tile, own);
  }
}

// Stores one tile's products: fragment row g is channel 2 g of the tile and g + 8 channel 2 g + 1; of gated experts
// row g is the gate and g + 8 the up projection of channel g.
template <class Format, int kTiles>
__device__ __forceinline__ void storeTile(const GroupedParams& p, const Round& round, int tile,
                                          const float (&sum)[kTiles][4]) {
  const int lane = laneAnew();
  const bool gated = p.epilogue == ExpertEpilogue::kSwiglu;
  const int channel = gated ? tile * 8 + lane / 4 : tile * 16 + lane / 4 * 2;
  if (channel >= p.outRows) return;
  const float* factor = p.factor + round.expert * p.factorExpert + channel * p.factorRow;
  const float first = factor[0] * Format::kFactor;
  const float second = factor[gated ? p.factorPart : p.factorRow] * Format::kFactor;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = n * 8 + lane % 4 * 2 + i;
      if (column >= round.count) continue;
      const int64_t row = round.first + column;
      float low = sum[n][i] * first, high = sum[n][2 + i] * second;
      uint16_t* at = static_cast<uint16_t*>(p.out) + row * p.outStride + channel;
      if (gated) {
        *at = Activation<__nv_bfloat16>::fromFloat(siluFast(low) * high);
        continue;
      }
      if (p.epilogue == ExpertEpilogue::kRelu2) {
        low = squaredRelu(low);
        high = squaredRelu(high);
      }
      const float weight = p.epilogue == ExpertEpilogue::kWeighted ? p.rowWeight[row] : 1.0f;
      *reinterpret_cast<uint32_t*>(at) = packPair<__nv_bfloat16>(low * weight, high * weight);
    }
  }
}

// All steps of one round.
template <class T, int kTiles>
__device__ __forceinline__ void runRound(const GroupedParams& p, BlockState& state, const Round& round, uint32_t ring,
                                         Cursor& cursor) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool many = T::tileOf(round.tile, warp, T::kWarpTiles / 2) < p.tiles;  // a last round of few tiles: half as many
  float sum[T::kWarpTiles][kTiles][4] = {};
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    barrierWait(sharedAddress(&state.full[cursor.stage]), cursor.parity);
    const uint32_t stage = ring + static_cast<uint32_t>(cursor.stage * p.stageBytes);
    if (many) {
      consume<T, T::kWarpTiles>(sum, stage);
    } else {
      consume<T, T::kWarpTiles / 2>(sum, stage);
    }
    __syncwarp();
    if (kEveryLaneArrives || threadIdx.x % 32 == 0) barrierArrive(sharedAddress(&state.empty[cursor.stage]));
    cursor.advance(p.stages);
  }
#pragma unroll
  for (int i = 0; i < T::kWarpTiles; ++i) {
    const int tile = T::tileOf(round.tile, warp, i);
    if (tile < p.tiles) storeTile<typename T::Format, kTiles>(p, round, tile, sum[i]);
  }
}

// The round with as many tiles of tokens as it has.
template <class T, int kTiles>
__device__ __forceinline__ void runTiles(const GroupedParams& p, BlockState& state, const Round& round, uint32_t ring,
                                         Cursor& cursor, int tiles) {
  if constexpr (kTiles < T::kMost) {
    if (tiles > kTiles) return runTiles<T, kTiles + 1>(p, state, round, ring, cursor, tiles);
  }
  runRound<T, kTiles>(p, state, round, ring, cursor);
}

template <class T>
__device__ __forceinline__ void multiply(const GroupedParams& p, BlockState& state, uint32_t ring) {
  Cursor cursor;
  while (true) {
    barrierWait(sharedAddress(&state.full[cursor.stage]), cursor.parity);
    const Round round = state.rounds[cursor.stage];
    const int tiles = (round.count + 7) / 8;
    if (tiles == 0) return;
    runTiles<T, 1>(p, state, round, ring, cursor, tiles);
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocks) groupedKernel(const __grid_constant__ GroupedParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ BlockState state;
  if (threadIdx.x < kMostStages) {
    barrierInit(sharedAddress(&state.full[threadIdx.x]), T::kFullArrivals);
    barrierInit(sharedAddress(&state.empty[threadIdx.x]), T::kWarps * kWarpArrivals);
    barrierInitFence();
  }
  // HAZARD: the first product waits before it releases its dependents, so that the plan, two launches back, is there
  // when the second reads it before its own wait.
  if (!p.weightsFirst) waitForPredecessor();
  releaseDependents();
  findRun<T::kRoundGroups>(p, passesOf(p), state.run);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp < T::kWarps) {
    multiply<T>(p, state, sharedAddress(memory));
  } else if (warp == T::kWarps) {
    produceWeights<T>(p, state, sharedAddress(memory));
  } else {
    produceTokens<T>(p, state, sharedAddress(memory), warp - T::kWarps - 1);
  }
}

}  // namespace replayssm
