// The warps that fill the ring of a product of many tokens: weights and tokens of a step by bulk copies.
#pragma once

#include "kernels/common/warp_arrival.cuh"
#include "producer.cuh"
#include "warpgroup.cuh"

namespace replayssm {

// kWarps_: that multiply, whole warpgroups.
template <class Format_, int kWarps_>
struct DeepTraits {
  using Format = Format_;
  static constexpr int kSyncTiles = 2;  // of 8 tokens: passes of so few are multiplied by every warp for itself
  static constexpr int kOpenTiles = 6;  // of so few registers allow products that stay open from a stage to the next
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = (kWarps + 4) * 32;
  static constexpr int kMultiplyRegisters = kWarps == 16 ? 112 : 152, kProduceRegisters = kWarps == 16 ? 32 : 56;
  static constexpr int kRoundTiles = kWarps * 2, kRoundGroups = kRoundTiles / kLayoutTiles;
  static_assert(kWarps % 4 == 0 && kRoundTiles % kLayoutTiles == 0, "whole warpgroups and whole groups of tiles");

  static constexpr int kSubs = Format::kStepColumns / 32;  // of two instructions each
  static constexpr int kColumnBytes = Format::kStepColumns * 2;
  static constexpr int kTileBytes = Format::kPieces * kPieceBytes, kScaleTileBytes = Format::kScaleBytes * 32;
  static constexpr int kGroupBytes = kLayoutTiles * kTileBytes, kGroupScales = kLayoutTiles * kScaleTileBytes;
  // A stage: elements, scales, routing weights of the rows (with a round's last step), tokens.
  static constexpr int kElementBytes = kRoundTiles * kTileBytes;
  static constexpr int kRowWeights = kElementBytes + kRoundTiles * kScaleTileBytes;
  static constexpr int kTokens = kRowWeights + kMaxPassTokens * static_cast<int>(sizeof(float));
  __host__ __device__ static constexpr int stageBytes(int tokens) { return kTokens + tokens * kColumnBytes; }
};

// The round that begins with a stage, `tiles` from the tile-th on; count 0: there are no more. `factor`: where all rows
// have the same.
struct DeepRound {
  int32_t expert, first, count, tile, tiles;
  float factor[2];
  __device__ __forceinline__ int rows() const { return (count + 7) & ~7; }
};

struct DeepState {
  Place run[2];
  uint64_t full[kMostStages], empty[kMostStages];
  DeepRound rounds[kMostStages];
};

template <class T>
struct DeepWeights {
  const GroupedParams& p;
  DeepState& state;
  StepWalk<T::kRoundGroups> walk;
  int lane;
  float factor[2];

  __device__ DeepWeights(const GroupedParams& params, DeepState& deepState)
      : p(params), state(deepState), walk(params, deepState.run), lane(static_cast<int>(threadIdx.x) % 32), factor{} {
    readFactors();
  }
  __device__ void readFactors() {
    if (walk.entry.count == 0 || p.factorRow != 0) return;
    const float* at = p.factor + walk.entry.expert * p.factorExpert;
    factor[0] = at[0];
    factor[1] = p.epilogue == ExpertEpilogue::kSwiglu ? at[p.factorPart] : at[0];
  }
  __device__ void copy(uint32_t target, int stage) const {
    const ExpertEntry& entry = walk.entry;
    const uint32_t barrier = sharedAddress(&state.full[stage]);
    const int groups = walk.groups();
    if (lane == 0) {
      if (walk.step == 0) {
        state.rounds[stage] = {entry.expert, entry.first, entry.count, walk.group * kLayoutTiles, groups * kLayoutTiles,
                               {factor[0], factor[1]}};
      }
      barrierArriveExpect(barrier, static_cast<uint32_t>(groups * (T::kGroupBytes + T::kGroupScales)));
    }
    __syncwarp();
    if (lane >= groups) return;
    const int64_t block = (static_cast<int64_t>(entry.expert) * p.groups + walk.group + lane) * p.steps + walk.step;
    bulkLoadOnce(target + lane * T::kGroupBytes, p.weights + block * T::kGroupBytes, T::kGroupBytes, barrier);
    if constexpr (T::kGroupScales > 0) {
      bulkLoadOnce(target + T::kElementBytes + lane * T::kGroupScales, p.blockScales + block * T::kGroupScales,
                   T::kGroupScales, barrier);
    }
  }
};

// The life of the warp that copies weights. They do not wait for the predecessor: the plan is there.
template <class T>
__device__ __forceinline__ void deepWeights(const GroupedParams& p, DeepState& state, uint32_t ring) {
  DeepWeights<T> weights(p, state);
  Cursor cursor;
  while (weights.walk.entry.count > 0) {
    weights.copy(ring + static_cast<uint32_t>(cursor.stage * p.stageBytes), cursor.stage);
    cursor.advance(p.stages);
    if (weights.walk.advance() == Entered::kPass) weights.readFactors();
    barrierWait(sharedAddress(&state.empty[cursor.stage]), cursor.parity ^ 1);
  }
  if (weights.lane != 0) return;
  state.rounds[cursor.stage].count = 0;  // a round that is none
  barrierArrive(sharedAddress(&state.full[cursor.stage]));
}

// The life of the thread that copies tokens.
template <class T>
__device__ __forceinline__ void deepTokens(const GroupedParams& p, DeepState& state, uint32_t ring) {
  StepWalk<T::kRoundGroups> walk(p, state.run);
  Cursor cursor;
  waitForPredecessor();
  while (walk.entry.count > 0) {
    const int first = walk.entry.first, rows = (walk.entry.count + 7) & ~7;
    const bool weighted = p.epilogue == ExpertEpilogue::kWeighted && walk.step == p.steps - 1;
    const uint32_t barrier = sharedAddress(&state.full[cursor.stage]);
    const uint32_t target = ring + static_cast<uint32_t>(cursor.stage * p.stageBytes);
    const int64_t at = first * p.inStride + static_cast<int64_t>(walk.step) * (rows * T::Format::kStepColumns);
    barrierArriveExpect(barrier, static_cast<uint32_t>(rows * (T::kColumnBytes + (weighted ? 4 : 0))));
    bulkLoad(target + T::kTokens, static_cast<const uint16_t*>(p.in) + at, rows * T::kColumnBytes, barrier);
    if (weighted) bulkLoad(target + T::kRowWeights, p.rowWeight + first, rows * 4, barrier);
    cursor.advance(p.stages);
    walk.advance();
    barrierWait(sharedAddress(&state.empty[cursor.stage]), cursor.parity ^ 1);
  }
  barrierArrive(sharedAddress(&state.full[cursor.stage]));
}

}  // namespace replayssm
