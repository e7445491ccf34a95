// The warp that fills the ring of a product of many tokens: weights and tokens of a step by bulk copies.
#pragma once

#include "kernels/common/mbarrier.cuh"
#include "kernels/common/mma.cuh"
#include "producer.cuh"

namespace replayssm {

// kWarps_: that multiply, whole warpgroups.
template <class Format_, int kWarps_>
struct DeepTraits {
  using Format = Format_;
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

// The round that begins with a stage; count 0: there are no more. `factor`: where all rows have the same.
struct DeepRound {
  int32_t expert, first, count, round;
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
  StepWalk walk;
  Cursor cursor;
  int lane, all;
  float factor[2];

  __device__ DeepWeights(const GroupedParams& params, DeepState& deepState)
      : p(params), state(deepState), walk(params, deepState.run), lane(static_cast<int>(threadIdx.x) % 32),
        all((params.tiles + kLayoutTiles - 1) / kLayoutTiles), factor{} {
    readFactors();
  }
  __device__ bool more() const { return walk.entry.count > 0; }
  __device__ void readFactors() {
    if (!more() || p.factorRow != 0) return;
    const float* at = p.factor + walk.entry.expert * p.factorExpert;
    factor[0] = at[0];
    factor[1] = p.epilogue == ExpertEpilogue::kSwiglu ? at[p.factorPart] : at[0];
  }
  // Opens the stage at the cursor and asks for its weights; its tokens may come later.
  __device__ void step(uint32_t ring) {
    const ExpertEntry& entry = walk.entry;
    const uint32_t barrier = sharedAddress(&state.full[cursor.stage]);
    const uint32_t target = ring + static_cast<uint32_t>(cursor.stage * p.stageBytes);
    const int left = all - walk.round * T::kRoundGroups, groups = left < T::kRoundGroups ? left : T::kRoundGroups;
    if (lane == 0) {
      const DeepRound round = {entry.expert, entry.first, entry.count, walk.round, {factor[0], factor[1]}};
      if (walk.step == 0) state.rounds[cursor.stage] = round;
      const bool weighted = p.epilogue == ExpertEpilogue::kWeighted && walk.step == p.steps - 1;
      const int bytes = groups * (T::kGroupBytes + T::kGroupScales) + round.rows() * (T::kColumnBytes + (weighted ? 4 : 0));
      barrierArriveExpect(barrier, static_cast<uint32_t>(bytes));
    }
    __syncwarp();
    if (lane < groups) {
      const int64_t block =
          (static_cast<int64_t>(entry.expert) * all + walk.round * T::kRoundGroups + lane) * p.steps + walk.step;
      bulkLoadOnce(target + lane * T::kGroupBytes, p.weights + block * T::kGroupBytes, T::kGroupBytes, barrier);
      if constexpr (T::kGroupScales > 0) {
        bulkLoadOnce(target + T::kElementBytes + lane * T::kGroupScales, p.blockScales + block * T::kGroupScales,
                     T::kGroupScales, barrier);
      }
    }
    cursor.advance(p.stages);
    if (walk.advance() == Entered::kPass) readFactors();
  }
  // After the last: a round that is none.
  __device__ void close() {
    if (lane != 0) return;
    state.rounds[cursor.stage].count = 0;
    barrierArrive(sharedAddress(&state.full[cursor.stage]));
  }
};

template <class T>
struct DeepTokens {
  const GroupedParams& p;
  DeepState& state;
  StepWalk walk;
  Cursor cursor;

  __device__ DeepTokens(const GroupedParams& params, DeepState& deepState)
      : p(params), state(deepState), walk(params, deepState.run) {}
  // One lane calls `copy`, all of them `advance`.
  __device__ void copy(uint32_t ring) const {
    const int first = walk.entry.first, rows = (walk.entry.count + 7) & ~7;
    const uint32_t barrier = sharedAddress(&state.full[cursor.stage]);
    const uint32_t target = ring + static_cast<uint32_t>(cursor.stage * p.stageBytes);
    const int64_t at = first * p.inStride + static_cast<int64_t>(walk.step) * (rows * T::Format::kStepColumns);
    bulkLoad(target + T::kTokens, static_cast<const uint16_t*>(p.in) + at, rows * T::kColumnBytes, barrier);
    if (p.epilogue == ExpertEpilogue::kWeighted && walk.step == p.steps - 1) {
      bulkLoad(target + T::kRowWeights, p.rowWeight + first, rows * 4, barrier);
    }
  }
  __device__ void advance() {
    cursor.advance(p.stages);
    walk.advance();
  }
};

// Weights do not wait for the predecessor: the plan is there.
template <class T>
__device__ __forceinline__ void deepProduce(const GroupedParams& p, DeepState& state, uint32_t ring) {
  DeepWeights<T> weights(p, state);
  DeepTokens<T> tokens(p, state);
  int open = 0;  // stages whose tokens have not been asked for
  while (open < p.stages && weights.more()) {
    weights.step(ring);
    ++open;
  }
  waitForPredecessor();
  while (true) {
    for (; open > 0; --open) {
      if (weights.lane == 0) tokens.copy(ring);
      tokens.advance();
    }
    barrierWait(sharedAddress(&state.empty[weights.cursor.stage]), weights.cursor.parity ^ 1);
    if (!weights.more()) break;
    weights.step(ring);
    ++open;
  }
  weights.close();
}

}  // namespace replayssm
