// Grouped products of passes of many tokens (sm_90a). Two to four warps fill the ring; sixteen multiply, two tiles each a
// round.
//
// Up to 16 tokens every warp multiplies for itself (deep_sync.cuh), more by the instructions of a warpgroup: operands of
// the next two are made while those before multiply.
#pragma once

#include "deep_sync.cuh"
#include "kernels/common/vector.cuh"

namespace replayssm {

// What stays of the descriptor of a stage's tokens: its lower word, the same in all lanes.
template <class T>
__device__ __forceinline__ uint32_t tokensWord(uint32_t stage) {
  const uint32_t word = (stage + T::kTokens) >> 4 | static_cast<uint32_t>(kCoreBytes >> 4) << 16;
  return __shfl_sync(0xffffffffu, word, 0);
}

// Of the kK-th 16 columns.
template <class T, int kK>
__device__ __forceinline__ uint64_t tokensOperand(uint32_t word) {
  constexpr uint32_t kGroup = 8 * T::kColumnBytes;  // from 8 tokens to the next 8
  return static_cast<uint64_t>(kGroup >> 4) << 32 | (word + kK * 2 * (kCoreBytes >> 4));
}

// 32 or 64 columns of one tile of every warp: their operands, when the products that read `a` before are complete, and two
// products for each 32.
template <class T, int kSub, int kTiles, int kUnits>
__device__ __forceinline__ void multiplyUnits(float (&sum)[kTiles][4], const typename T::Format& tile,
                                              uint32_t (&a)[kUnits][2][4], uint32_t tokens) {
  warpgroupWait<1>();
  tile.template operands<kSub>(a[0]);
  if constexpr (kUnits == 2) tile.template operands<kSub + 1>(a[1]);
  warpgroupFence();
  warpgroupMma(sum, a[0][0], tokensOperand<T, 2 * kSub>(tokens));
  warpgroupMma(sum, a[0][1], tokensOperand<T, 2 * kSub + 1>(tokens));
  if constexpr (kUnits == 2) {
    warpgroupMma(sum, a[1][0], tokensOperand<T, 2 * kSub + 2>(tokens));
    warpgroupMma(sum, a[1][1], tokensOperand<T, 2 * kSub + 3>(tokens));
  }
  warpgroupCommit();
}

// Units of 32 columns whose products are issued at once: two where registers allow.
template <class T, int kTiles>
constexpr int kUnitsOf = kTiles <= T::kPairTiles ? 2 : 1;

// Operands of products that are under way and of the next ones.
template <class T, int kTiles>
using Operands = uint32_t[2][kUnitsOf<T, kTiles>][2][4];

// What a warp multiplies of a stage: kRows tiles, one after the other, as registers are scarce. The last products stay
// open; `closed` runs when those of the stage before are complete.
template <class T, int kRows, int kTiles, class Closed>
__device__ __forceinline__ void multiplyStage(float (&sum)[kRows][kTiles][4], Operands<T, kTiles>& a, uint32_t stage,
                                              const Closed& closed) {
  const int lane = laneAnew(), slot = kRows * warpAnew();
  const uint32_t pieces = stage + slot * T::kTileBytes + lane * 16;
  const uint32_t scales = stage + T::kElementBytes + slot * T::kScaleTileBytes + lane * 4;
  const uint32_t tokens = tokensWord<T>(stage);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    typename T::Format tile;
    tile.loadFirst(pieces + i * T::kTileBytes, scales + i * T::kScaleTileBytes);
    multiplyUnits<T, 0>(sum[i], tile, a[0], tokens);
    if (i == 0) closed();
    if constexpr (kUnitsOf<T, kTiles> == 2) {
      tile.loadSecond(pieces + i * T::kTileBytes);
      multiplyUnits<T, 2>(sum[i], tile, a[1], tokens);
      continue;
    }
    if constexpr (T::kSubs == 2) tile.loadSecond(pieces + i * T::kTileBytes);
    multiplyUnits<T, 1>(sum[i], tile, a[1], tokens);
    if constexpr (T::kSubs == 4 && kUnitsOf<T, kTiles> == 1) {
      tile.loadSecond(pieces + i * T::kTileBytes);
      multiplyUnits<T, 2>(sum[i], tile, a[0], tokens);
      multiplyUnits<T, 3>(sum[i], tile, a[1], tokens);
    }
  }
}

// Factors of a lane's two rows of a tile.
template <class Format>
__device__ __forceinline__ float2 rowFactors(const GroupedParams& p, const DeepRound& round, int channel) {
  if (p.factorRow == 0) return {round.factor[0] * Format::kFactor, round.factor[1] * Format::kFactor};
  const float* factor = p.factor + round.expert * p.factorExpert + channel * p.factorRow;
  const bool gated = p.epilogue == ExpertEpilogue::kSwiglu;
  return {factor[0] * Format::kFactor, factor[gated ? p.factorPart : p.factorRow] * Format::kFactor};
}

// Element offset of a channel's first row in `out`, and from 8 rows to the next 8 and from row to row.
struct OutPlace {
  int64_t at;
  int group, row;

  __device__ __forceinline__ OutPlace(const GroupedParams& p, const DeepRound& round, int channel) {
    if (p.outStep == 0) {
      row = static_cast<int>(p.outStride);
      group = 8 * row;
      at = round.first * p.outStride + channel;
      return;
    }
    const int place = columnPlace(channel), step = place / p.outStep, inStep = place - step * p.outStep;
    row = 8;
    group = 8 * p.outStep;
    at = round.first * p.outStride + static_cast<int64_t>(step) * (round.rows() * p.outStep) + inStep / 8 * 64 + inStep % 8;
  }
};

// Two products of a row: what becomes of them, but for their routing weight.
__device__ __forceinline__ uint32_t finishPair(ExpertEpilogue epilogue, float low, float high, float weight) {
  if (epilogue == ExpertEpilogue::kRelu2) {
    low = squaredRelu(low);
    high = squaredRelu(high);
  }
  return packPair<__nv_bfloat16>(low * weight, high * weight);
}

// One tile's products. Padding is stored as well: its rows belong to nobody.
template <class Format, int kTiles>
__device__ __forceinline__ void storeDeep(const GroupedParams& p, const DeepRound& round, int tile,
                                          const float (&sum)[kTiles][4], const float* rowWeight) {
  const int lane = laneAnew(), groups = round.rows() / 8;
  const bool gated = p.epilogue == ExpertEpilogue::kSwiglu;
  const int channel = gated ? tile * 8 + lane / 4 : tile * 16 + lane / 4 * 2;
  if (channel >= p.outRows) return;
  const float2 factor = rowFactors<Format>(p, round, channel);
  const OutPlace place(p, round, channel);
  uint16_t* out = static_cast<uint16_t*>(p.out) + place.at + lane % 4 * 2 * place.row;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (n >= groups) break;
    float2 weight = {1.0f, 1.0f};
    if (rowWeight != nullptr) weight = *reinterpret_cast<const float2*>(rowWeight + n * 8 + lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = sum[n][i] * factor.x, high = sum[n][2 + i] * factor.y;
      uint16_t* at = out + n * place.group + i * place.row;
      if (gated) {
        *at = Activation<__nv_bfloat16>::fromFloat(siluFast(low) * high);
      } else {
        *reinterpret_cast<uint32_t*>(at) = finishPair(p.epilogue, low, high, i == 0 ? weight.x : weight.y);
      }
    }
  }
}

// Two neighbouring tiles into the order of a product's steps, where their channels are neighbours: 8 bytes at once.
template <class Format, int kTiles>
__device__ __forceinline__ void storeJoined(const GroupedParams& p, const DeepRound& round, int tile,
                                            const float (&sum)[2][kTiles][4]) {
  const int lane = laneAnew(), groups = round.rows() / 8, channel = tile * 16 + lane / 4 * 2;
  if (channel >= p.outRows) return;
  const float2 factor = rowFactors<Format>(p, round, channel), next = rowFactors<Format>(p, round, channel + 16);
  const OutPlace place(p, round, channel);
  uint16_t* out = static_cast<uint16_t*>(p.out) + place.at + lane % 4 * 2 * place.row;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (n >= groups) break;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint2 words;
      words.x = finishPair(p.epilogue, sum[0][n][i] * factor.x, sum[0][n][2 + i] * factor.y, 1.0f);
      words.y = finishPair(p.epilogue, sum[1][n][i] * next.x, sum[1][n][2 + i] * next.y, 1.0f);
      *reinterpret_cast<uint2*>(out + n * place.group + i * place.row) = words;
    }
  }
}

// A warp's products of a round.
template <class T, int kRows, int kTiles>
__device__ __forceinline__ void storeRound(const GroupedParams& p, const DeepRound& round, int slot,
                                           const float (&sum)[kRows][kTiles][4], const float* rowWeight) {
  const int tile = round.tile + slot;
  if constexpr (kRows == 2) {
    if (p.outStep > 0 && p.epilogue == ExpertEpilogue::kRelu2) {
      return storeJoined<typename T::Format, kTiles>(p, round, tile, sum);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) storeDeep<typename T::Format, kTiles>(p, round, tile + i, sum[i], rowWeight);
}

// This warp's share of a stage goes back to the ring.
__device__ __forceinline__ void release(DeepState& state, Cursor& cursor, int stages) {
  __syncwarp();
  if (kEveryLaneArrives || threadIdx.x % 32 == 0) barrierArrive(sharedAddress(&state.empty[cursor.stage]));
  cursor.advance(stages);
}

// The share of the stage before that at the cursor.
__device__ __forceinline__ void releaseBefore(DeepState& state, const Cursor& cursor, int stages) {
  const int before = cursor.stage > 0 ? cursor.stage - 1 : stages - 1;
  __syncwarp();
  if (kEveryLaneArrives || threadIdx.x % 32 == 0) barrierArrive(sharedAddress(&state.empty[before]));
}

// One stage, by itself.
template <class T, int kRows, int kTiles>
__device__ __forceinline__ void closedStage(float (&sum)[kRows][kTiles][4], uint32_t stage) {
  if constexpr (kTiles <= T::kSyncTiles) {
    syncStage<T, kRows, kTiles>(sum, stage);
  } else {
    Operands<T, kTiles> a;
    multiplyStage<T, kRows, kTiles>(sum, a, stage, [] {});
    warpgroupWait<0>();
  }
}

// All steps of a round; the last stage stays at the cursor.
template <class T, int kRows, int kTiles>
__device__ __forceinline__ void deepSteps(const GroupedParams& p, DeepState& state, float (&sum)[kRows][kTiles][4],
                                          uint32_t ring, Cursor& cursor) {
  const auto stageAt = [&] { return ring + static_cast<uint32_t>(cursor.stage * p.stageBytes); };
  int left = p.steps;
  if constexpr (kTiles > T::kSyncTiles && kTiles <= T::kOpenTiles) {
    // Two stages; what is open at the end of the first closes within the second.
#pragma unroll 1
    for (; left > 1; left -= 2) {
      Operands<T, kTiles> a;
      barrierWait(sharedAddress(&state.full[cursor.stage]), cursor.parity);
      multiplyStage<T, kRows, kTiles>(sum, a, stageAt(), [] {});
      cursor.advance(p.stages);
      barrierWait(sharedAddress(&state.full[cursor.stage]), cursor.parity);
      multiplyStage<T, kRows, kTiles>(sum, a, stageAt(), [&] {
        warpgroupWait<1>();
        releaseBefore(state, cursor, p.stages);
      });
      warpgroupWait<0>();
      if (left > 2) release(state, cursor, p.stages);
    }
    if (left == 0) return;
  }
#pragma unroll 1
  for (; left > 0; --left) {
    barrierWait(sharedAddress(&state.full[cursor.stage]), cursor.parity);
    closedStage<T, kRows, kTiles>(sum, stageAt());
    if (left > 1) release(state, cursor, p.stages);
  }
}

// One round: kRows tiles of every warp of this warpgroup.
template <class T, int kRows, int kTiles>
__device__ __forceinline__ void deepRound(const GroupedParams& p, DeepState& state, const DeepRound& round, uint32_t ring,
                                          const uint8_t* memory, Cursor& cursor) {
  float sum[kRows][kTiles][4] = {};
  deepSteps<T, kRows, kTiles>(p, state, sum, ring, cursor);
  const float* weight = p.epilogue == ExpertEpilogue::kWeighted
                            ? reinterpret_cast<const float*>(memory + cursor.stage * p.stageBytes + T::kRowWeights)
                            : nullptr;
  storeRound<T, kRows, kTiles>(p, round, kRows * warpAnew(), sum, weight);
  release(state, cursor, p.stages);
}

// A round of which this warpgroup has no tile.
template <class T>
__device__ __forceinline__ void passRound(const GroupedParams& p, DeepState& state, Cursor& cursor) {
  for (int step = 0; step < p.steps; ++step) {
    barrierWait(sharedAddress(&state.full[cursor.stage]), cursor.parity);
    release(state, cursor, p.stages);
  }
}

// The round with as many tiles of tokens as it has.
template <class T, int kRows, int kTiles>
__device__ __forceinline__ void deepTiles(const GroupedParams& p, DeepState& state, const DeepRound& round, uint32_t ring,
                                          const uint8_t* memory, Cursor& cursor) {
  if constexpr (kTiles < kMaxPassTokens / 8) {
    if (round.rows() / 8 > kTiles) return deepTiles<T, kRows, kTiles + 1>(p, state, round, ring, memory, cursor);
  }
  deepRound<T, kRows, kTiles>(p, state, round, ring, memory, cursor);
}

template <class T>
__device__ __forceinline__ void deepMultiply(const GroupedParams& p, DeepState& state, uint32_t ring,
                                             const uint8_t* memory) {
  const int first = static_cast<int>(threadIdx.x) / 128 * 4;  // warp of this warpgroup
  Cursor cursor;
  while (true) {
    barrierWait(sharedAddress(&state.full[cursor.stage]), cursor.parity);
    const DeepRound round = state.rounds[cursor.stage];
    if (round.count == 0) return;
    // A round of few tiles gives every warp one before any gets two.
    const int rows = round.tiles <= T::kWarps ? 1 : 2;
    if (round.tiles <= rows * first) {
      passRound<T>(p, state, cursor);
    } else if (rows == 1) {
      deepTiles<T, 1, 1>(p, state, round, ring, memory, cursor);
    } else {
      deepTiles<T, 2, 1>(p, state, round, ring, memory, cursor);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) deepKernel(const __grid_constant__ GroupedParams p) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ DeepState state;
  if (threadIdx.x < kMostStages) {
    barrierInit(sharedAddress(&state.full[threadIdx.x]), 2);  // weights, tokens
    barrierInit(sharedAddress(&state.empty[threadIdx.x]), T::kWarps * kWarpArrivals);
    barrierInitFence();
  }
  if (!p.weightsFirst) waitForPredecessor();
  releaseDependents();  // after the wait: the plan is complete when the next product starts
  const int passes = passesOf(p), dealt = dealtPasses<T>(p, passes);
  if (threadIdx.x == 0) state.draws = {dealt, passes, 0, {}};
  findRun<1>(p, dealt, state.run);
  if (threadIdx.x / 32 < T::kWarps) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::kMultiplyRegisters));
    deepMultiply<T>(p, state, sharedAddress(memory), memory);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::kProduceRegisters));
    if (threadIdx.x / 32 == T::kWarps) deepWeights<T>(p, state, sharedAddress(memory));
    if (p.rowToken != nullptr) {
      const int warp = static_cast<int>(threadIdx.x) / 32 - T::kWarps - 1;
      if (warp >= 0) deepPicked<T>(p, state, sharedAddress(memory), warp);
    } else if (threadIdx.x == (T::kWarps + 1) * 32) {
      deepTokens<T>(p, state, sharedAddress(memory));
    }
  }
}

}  // namespace replayssm
