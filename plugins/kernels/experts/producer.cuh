// The warps of a block that fill its ring: one copies weights, the others tokens. A stage holds the weights of a round's
// tiles for one step and the tokens' columns of that step. `full` barriers hand a stage over, `empty` barriers give it
// back; the ring runs on over rounds, passes and experts.
#pragma once

#include "kernels/common/mbarrier.cuh"
#include "traits.cuh"
#include "walk.cuh"

namespace replayssm {

// The round that begins with a stage; count 0: there are no more.
struct Round {
  int32_t expert, first, count, round;
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

// The order of steps through a block's run, which each warp that copies follows for itself.
struct StepWalk {
  const GroupedParams& p;
  const Place* run;
  int index, round, step;
  ExpertEntry entry;  // count 0: at the end

  __device__ StepWalk(const GroupedParams& params, const Place* places)
      : p(params), run(places), index(run[0].index), round(run[0].round), step(0), entry{} {
    if (!atEnd()) entry = passAt(p, index);
  }
  __device__ bool atEnd() const { return index == run[1].index && round == run[1].round; }
  __device__ Entered advance() {
    if (++step < p.steps) return Entered::kNothing;
    step = 0;
    const bool pass = ++round == p.rounds;
    if (pass) {
      round = 0;
      ++index;
    }
    if (atEnd()) {
      entry.count = 0;
    } else if (pass) {
      entry = passAt(p, index);
    }
    return pass ? Entered::kPass : Entered::kRound;
  }
};

// Weights come in bulk copies of a group of tiles, as many lanes as groups.
template <class T>
struct WeightCopies {
  BlockState& state;
  StepWalk walk;
  int lane, groups;
  int64_t block;  // group of tiles and step of this lane's copy

  __device__ WeightCopies(const GroupedParams& p, BlockState& blockState)
      : state(blockState), walk(p, blockState.run), lane(static_cast<int>(threadIdx.x) % 32) {
    enter(0);
  }
  // The round's first step goes to `stage`.
  __device__ void enter(int stage) {
    const GroupedParams& p = walk.p;
    if (lane == 0) state.rounds[stage] = {walk.entry.expert, walk.entry.first, walk.entry.count, walk.round};
    const int all = (p.tiles + kLayoutTiles - 1) / kLayoutTiles, left = all - walk.round * T::kRoundGroups;
    groups = left < T::kRoundGroups ? left : T::kRoundGroups;
    block = (static_cast<int64_t>(walk.entry.expert) * all + walk.round * T::kRoundGroups + lane) * p.steps;
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
  StepWalk walk;
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
