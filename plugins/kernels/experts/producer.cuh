// The warps of a block that fill its ring: one copies weights, the others tokens. A stage holds the weights of a round's
// tiles for one step and the tokens' columns of that step. `full` barriers hand a stage over, `empty` barriers give it
// back; the ring runs on over rounds, passes and experts.
#pragma once

#include "kernels/common/warp_arrival.cuh"
#include "traits.cuh"
#include "walk.cuh"

namespace replayssm {

// The round that begins with a stage, `tiles` from the tile-th on; count 0: there are no more.
struct Round {
  int32_t expert, first, count, tile, tiles;
};

// What a block keeps in shared memory beside the ring.
struct BlockState {
  Place run[2];
  uint64_t full[kMostStages], empty[kMostStages];
  Round rounds[kMostStages];
};

// A position in the ring: stage, and the parity of its barriers' phases.
struct Cursor {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

enum class Entered { kNothing, kRound, kPass };

// The order of steps through a block's run, which each warp that copies follows for itself: pass by pass, in rounds of up
// to kRoundGroups groups.
template <int kRoundGroups>
struct StepWalk {
  const GroupedParams& p;
  const Place* run;
  int index, group, end, step;  // of the pass; the round's first and behind the pass's last of this run; of the round
  ExpertEntry entry;            // count 0: at the end

  __device__ StepWalk(const GroupedParams& params, const Place* places)
      : p(params), run(places), index(places[0].index), group(0), end(0), step(0), entry{} {
    if (!(run[0] == run[1])) enter();
  }
  __device__ void enter() {
    entry = passAt(p, index);
    group = index == run[0].index ? run[0].group : 0;
    end = index == run[1].index ? run[1].group : p.groups;
  }
  // Groups of this round.
  __device__ int groups() const { return end - group < kRoundGroups ? end - group : kRoundGroups; }
  __device__ Entered advance() {
    if (++step < p.steps) return Entered::kNothing;
    step = 0;
    group += kRoundGroups;
    if (group < end) return Entered::kRound;
    ++index;
    if (index > run[1].index || (index == run[1].index && run[1].group == 0)) {
      entry.count = 0;
    } else {
      enter();
    }
    return Entered::kPass;
  }
};

// Weights come in bulk copies of a group of tiles, as many lanes as groups.
template <class T>
struct WeightCopies {
  BlockState& state;
  StepWalk<T::kRoundGroups> walk;
  int lane, groups;
  int64_t block;  // group of tiles and step of this lane's copy

  __device__ WeightCopies(const GroupedParams& p, BlockState& blockState)
      : state(blockState), walk(p, blockState.run), lane(static_cast<int>(threadIdx.x) % 32) {
    enter(0);
  }
  // The round's first step goes to `stage`.
  __device__ void enter(int stage) {
    const ExpertEntry& entry = walk.entry;
    groups = walk.groups();
    if (lane == 0) {
      state.rounds[stage] = {entry.expert, entry.first, entry.count, walk.group * kLayoutTiles, groups * kLayoutTiles};
    }
    block = (static_cast<int64_t>(entry.expert) * walk.p.groups + walk.group + lane) * walk.p.steps;
  }
  __device__ void advance(int stage) {
    ++block;
    if (walk.advance() != Entered::kNothing) enter(stage);
  }
  __device__ void copy(uint32_t target, uint32_t barrier) const {
    constexpr uint32_t kElements = kLayoutTiles * T::kTileBytes, kScales = kLayoutTiles * T::kScaleTileBytes;
    if (lane == 0) barrierArriveExpect(barrier, static_cast<uint32_t>(groups) * (kElements + kScales));
    __syncwarp();
    if (lane >= groups) return;
    bulkLoad(target + lane * kElements, walk.p.weights + block * kElements, kElements, barrier);
    if constexpr (kScales > 0) {
      bulkLoad(target + T::kElementBytes + lane * kScales, walk.p.blockScales + block * kScales, kScales, barrier);
    }
  }
};

// Sixteen bytes of which the last 16 - `valid` are zeros.
__device__ __forceinline__ void pieceLoadPart(uint32_t target, const void* source, uint32_t valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid) : "memory");
}

// Tokens come in pieces of 16 bytes: a bulk copy costs its engine too much for so few.
template <class T>
struct TokenCopies {
  StepWalk<T::kRoundGroups> walk;
  int piece, firstRow;          // the first of this lane
  int32_t token[T::kLaneRows];  // row of `in` of its tokens: firstRow, firstRow + kRowStride, ...
  static constexpr int kRowStride = T::kRowsAtOnce * T::kTokenWarps;

  __device__ TokenCopies(const GroupedParams& p, const BlockState& state, int warp) : walk(p, state.run), token{} {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    piece = lane % T::kPieceLanes;
    firstRow = warp * T::kRowsAtOnce + lane / T::kPieceLanes;
    findTokens();
  }
  __device__ void findTokens() {
#pragma unroll
    for (int i = 0; i < T::kLaneRows; ++i) {
      const int row = firstRow + i * kRowStride, place = walk.entry.first + row;
      if (row < walk.entry.count) token[i] = walk.p.rowToken == nullptr ? place : walk.p.rowToken[place];
    }
  }
  __device__ void advance() {
    if (walk.advance() == Entered::kPass) findTokens();
  }
  // Columns beyond K become zeros. Tokens beyond the count stay what they are: they end in columns of the product that
  // nobody stores.
  __device__ void copy(uint32_t target, uint32_t barrier) const {
    const GroupedParams& p = walk.p;
#pragma unroll
    for (int j = 0; j < T::kLanePieces; ++j) {
      const int own = piece + j * T::kPieceLanes, column = walk.step * T::Format::kStepColumns + own * 8;
      const int left = (p.columns - column) * 2;
      const uint32_t valid = left >= 16 ? 16u : (left > 0 ? static_cast<uint32_t>(left) : 0u);
      const auto* in = static_cast<const uint16_t*>(p.in) + (valid == 0 ? 0 : column);
#pragma unroll
      for (int i = 0; i < T::kLaneRows; ++i) {
        const int row = firstRow + i * kRowStride;
        if (row >= walk.entry.count) break;
        pieceLoadPart(target + T::kWeightBytes + T::pieceOffset(row, own), in + token[i] * p.inStride, valid);
      }
    }
    loadsArrive(barrier);
  }
};

// The life of the warp that copies weights. Where the plan is there before the predecessor has ended, weights do not wait.
template <class T>
__device__ __forceinline__ void produceWeights(const GroupedParams& p, BlockState& state, uint32_t ring) {
  WeightCopies<T> copies(p, state);
  Cursor cursor;
  while (copies.walk.entry.count > 0) {
    copies.copy(ring + static_cast<uint32_t>(cursor.stage * p.stageBytes), sharedAddress(&state.full[cursor.stage]));
    cursor.advance(p.stages);
    barrierWait(sharedAddress(&state.empty[cursor.stage]), cursor.parity ^ 1);
    copies.advance(cursor.stage);
  }
  if (copies.lane == 0) barrierArrive(sharedAddress(&state.full[cursor.stage]));
}

// The life of a warp that copies tokens, the warp-th of its kind.
template <class T>
__device__ __forceinline__ void produceTokens(const GroupedParams& p, BlockState& state, uint32_t ring, int warp) {
  if (p.weightsFirst) waitForPredecessor();
  TokenCopies<T> copies(p, state, warp);
  Cursor cursor;
  while (copies.walk.entry.count > 0) {
    copies.copy(ring + static_cast<uint32_t>(cursor.stage * p.stageBytes), sharedAddress(&state.full[cursor.stage]));
    cursor.advance(p.stages);
    barrierWait(sharedAddress(&state.empty[cursor.stage]), cursor.parity ^ 1);
    copies.advance();
  }
  barrierArrive(sharedAddress(&state.full[cursor.stage]));
  loadsDrain();
}

}  // namespace replayssm
