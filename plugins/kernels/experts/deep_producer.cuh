// The warps that fill the ring of a product of many tokens: weights of a step by bulk copies, tokens by one, too, where the
// pass's lie in the order of the steps, else picked row by row.
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
  static constexpr int kPairTiles = Format::kStepColumns == 128 ? 6 : 0;  // of so few for the operands of 64 columns
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

// Multiprocessors do not all get the same bandwidth, and no cost of a pass is exact: the last passes are drawn in pieces by
// whoever is ready. The warp that copies weights draws; those that copy tokens follow.
constexpr int kDrawnShare = 16;    // of the passes one in as many
constexpr int kHalfRoundSteps = 16;  // from so many on a piece is half a round, a tile for every warp, else a whole one
// HAZARD: followers must read a number before it is overwritten; they are behind by no more stages than the ring has, and a
// piece is a stage at least.
constexpr int kDrawnNumbers = 2 * kMostStages;

// Groups of tiles of a piece, and pieces of a pass.
template <class T>
__device__ __forceinline__ int pieceGroups(const GroupedParams& p) {
  return p.steps < kHalfRoundSteps ? T::kRoundGroups : T::kRoundGroups / 2;
}
template <class T>
__device__ __forceinline__ int piecesOf(const GroupedParams& p) {
  return (p.groups + pieceGroups<T>(p) - 1) / pieceGroups<T>(p);
}

// The passes that are dealt out, before those that are drawn: where there is not a piece for every other block, all.
template <class T>
__device__ __forceinline__ int dealtPasses(const GroupedParams& p, int passes) {
  const int drawn = passes / kDrawnShare;
  return drawn * piecesOf<T>(p) * 2 >= static_cast<int>(gridDim.x) ? passes - drawn : passes;
}

// What a block has drawn.
struct DeepDraws {
  int32_t dealt, passes;
  int32_t count;
  int32_t number[kDrawnNumbers];
};

struct DeepState {
  Place run[2];
  DeepDraws draws;
  uint64_t full[kMostStages], empty[kMostStages];
  DeepRound rounds[kMostStages];
};

// The order of steps through a block's run and then through the pieces that it draws. kDraws: by a whole warp, which draws.
template <class T, bool kDraws>
struct DeepWalk : StepWalk<T::kRoundGroups> {
  using Run = StepWalk<T::kRoundGroups>;
  DeepDraws& draws;
  int drawn;  // pieces that this walk has seen

  __device__ DeepWalk(const GroupedParams& params, DeepState& state) : Run(params, state.run), draws(state.draws), drawn(0) {
    if (this->entry.count == 0) enterPiece();
  }
  __device__ Entered advance() {
    const Entered entered = Run::advance();
    if (this->entry.count == 0) enterPiece();
    return entered;
  }
  __device__ int nextNumber() {
    const int at = drawn++ % kDrawnNumbers;
    volatile DeepDraws& shared = draws;
    if constexpr (kDraws) {
      const bool first = threadIdx.x % 32 == 0;
      const int number = __shfl_sync(0xffffffffu, first ? atomicAdd(this->p.tickets, 1) : 0, 0);
      if (first) {
        shared.number[at] = number;
        __threadfence_block();
        shared.count = drawn;
      }
      return number;
    } else {
      while (shared.count < drawn) {
      }
      __threadfence_block();
      return shared.number[at];
    }
  }
  __device__ void enterPiece() {
    const int each = piecesOf<T>(this->p), pieces = (draws.passes - draws.dealt) * each;
    if (pieces == 0) return;
    const int number = nextNumber();
    if (number >= pieces) return;
    this->index = draws.dealt + number / each;
    this->group = number % each * pieceGroups<T>(this->p);
    this->end = min(this->group + pieceGroups<T>(this->p), this->p.groups);
    this->entry = passAt(this->p, this->index);
  }
};

template <class T>
struct DeepWeights {
  const GroupedParams& p;
  DeepState& state;
  DeepWalk<T, true> walk;

  __device__ DeepWeights(const GroupedParams& params, DeepState& deepState)
      : p(params), state(deepState), walk(params, deepState) {}
  // Tells of the round that begins.
  __device__ void announce(int stage) const {
    const ExpertEntry& entry = walk.entry;
    DeepRound round = {entry.expert, entry.first, entry.count, walk.group * kLayoutTiles, walk.groups() * kLayoutTiles, {}};
    if (p.factorRow == 0) {
      const float* at = p.factor + entry.expert * p.factorExpert;
      round.factor[0] = at[0];
      round.factor[1] = at[p.epilogue == ExpertEpilogue::kSwiglu ? p.factorPart : 0];
    }
    state.rounds[stage] = round;
  }
  __device__ void copy(uint32_t target, int stage) const {
    const ExpertEntry& entry = walk.entry;
    const uint32_t barrier = sharedAddress(&state.full[stage]);
    const int lane = laneAnew(), groups = walk.groups();
    if (lane == 0) {
      if (walk.step == 0) announce(stage);
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
    weights.walk.advance();
    barrierWait(sharedAddress(&state.empty[cursor.stage]), cursor.parity ^ 1);
  }
  if (laneAnew() != 0) return;
  state.rounds[cursor.stage].count = 0;  // a round that is none
  barrierArrive(sharedAddress(&state.full[cursor.stage]));
}

// Warps that copy picked tokens, in turn a stage each, so that one stage's copies are on their way while another's arrive.
// HAZARD: no more than stages, else a barrier's parity would not tell a warp's phase from one two before.
constexpr int kPickWarps = 3;

// What one of them copies: a lane one of 8 rows, of each 32 columns 8.
template <class T>
struct PickedTokens {
  const GroupedParams& p;
  DeepWalk<T, false> walk;
  int lane;
  int32_t low, high;  // tokens of this pass's rows `lane` and `lane` + 32; beyond the last one that one again

  __device__ PickedTokens(const GroupedParams& params, DeepState& state)
      : p(params), walk(params, state), lane(static_cast<int>(threadIdx.x) % 32), low(0), high(0) {
    findTokens();
  }
  __device__ void findTokens() {
    const ExpertEntry& entry = walk.entry;
    if (entry.count == 0) return;
    low = __ldcg(p.rowToken + entry.first + min(lane, entry.count - 1));
    high = __ldcg(p.rowToken + entry.first + min(lane + 32, entry.count - 1));
  }
  __device__ void advance() {
    if (walk.advance() == Entered::kPass) findTokens();
  }
  __device__ void copy(uint32_t target) const {
    constexpr int kParts = T::Format::kStepColumns / 32;
    const auto* in = static_cast<const uint16_t*>(p.in) + walk.step * T::Format::kStepColumns + lane / kRowGroup * 8;
    target += lane / kRowGroup * kCoreBytes + lane % kRowGroup * 16;
#pragma unroll 1
    for (int row = 0; row < walk.entry.count; row += kRowGroup) {
      const int token = __shfl_sync(0xffffffffu, row < 32 ? low : high, row % 32 + lane % kRowGroup);
      const uint16_t* from = in + token * p.inStride;
      pieceLoad<0, 0>(target, from);
      pieceLoad<4 * kCoreBytes, 64>(target, from);
      if constexpr (kParts == 4) {
        pieceLoad<8 * kCoreBytes, 128>(target, from);
        pieceLoad<12 * kCoreBytes, 192>(target, from);
      }
      target += kRowGroup * T::kColumnBytes;
    }
  }
};

// The life of one of them. What ordinary copies wrote is read by other means, hence the fence.
template <class T>
__device__ __forceinline__ void deepPicked(const GroupedParams& p, DeepState& state, uint32_t ring, int warp) {
  PickedTokens<T> tokens(p, state);
  Cursor cursor;
  int turn = 0;
  while (tokens.walk.entry.count > 0) {
    if (turn == warp) {
      barrierWait(sharedAddress(&state.empty[cursor.stage]), cursor.parity ^ 1);
      tokens.copy(ring + static_cast<uint32_t>(cursor.stage * p.stageBytes) + T::kTokens);
      loadsDrain();
      asyncProxyFence();
      __syncwarp();
      if (tokens.lane == 0) barrierArrive(sharedAddress(&state.full[cursor.stage]));
    }
    cursor.advance(p.stages);
    tokens.advance();
    turn = turn + 1 < kPickWarps ? turn + 1 : 0;
  }
  if (turn != warp || tokens.lane != 0) return;
  barrierWait(sharedAddress(&state.empty[cursor.stage]), cursor.parity ^ 1);
  barrierArrive(sharedAddress(&state.full[cursor.stage]));
}

// The life of the thread that copies tokens which lie in the order of the steps.
template <class T>
__device__ __forceinline__ void deepTokens(const GroupedParams& p, DeepState& state, uint32_t ring) {
  DeepWalk<T, false> walk(p, state);
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
