// The warp of a block that fills its ring. A stage holds the weights of a round's tiles for one step and the tokens'
// columns of that step. `full` barriers hand a stage over, `empty` barriers give it back; the ring runs on over rounds,
// passes and experts.
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

// Sixteen bytes of which the last 16 - `valid` are zeros.
__device__ __forceinline__ void pieceLoadPart(uint32_t target, const void* source, uint32_t valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid) : "memory");
}

// Weights come in bulk copies of a group of tiles, as many lanes as groups; tokens in pieces of 16 bytes by all lanes: a
// bulk copy costs the engine too much for a token's few bytes.
template <class T>
struct Producer {
  using Format = typename T::Format;
  static constexpr int kRowPieces = T::kColumnBytes / 16;
  static constexpr int kRowsAtOnce = 32 / kRowPieces;

  const GroupedParams& p;
  BlockState& state;
  int lane, index, round, step, first, count, groups;
  int64_t block;     // group of tiles and step of this lane's copy
  int32_t token[2];  // row of `in` of the tokens lane and lane + 32

  __device__ Producer(const GroupedParams& params, BlockState& blockState)
      : p(params), state(blockState), lane(static_cast<int>(threadIdx.x) % 32), index(state.run[0].index),
        round(state.run[0].round), step(0), token{} {
    enter(0);
  }

  // Takes up the round at (index, round), whose first step goes to `stage`.
  __device__ void enter(int stage) {
    ExpertEntry entry{};
    if (index != state.run[1].index || round != state.run[1].round) entry = passAt(p, index);
    first = entry.first;
    count = entry.count;
    if (lane == 0) state.rounds[stage] = {entry.expert, first, count, round};
    const int all = (p.tiles + kLayoutTiles - 1) / kLayoutTiles, left = all - round * T::kRoundGroups;
    groups = left < T::kRoundGroups ? left : T::kRoundGroups;
    block = (static_cast<int64_t>(entry.expert) * all + round * T::kRoundGroups + lane) * p.steps;
  }
  // To the next step, which goes to `stage`. Returns whether it begins a round.
  __device__ bool advance(int stage) {
    ++block;
    if (++step < p.steps) return false;
    step = 0;
    if (++round == p.rounds) {
      round = 0;
      ++index;
    }
    enter(stage);
    return true;
  }
  __device__ void copyWeights(uint32_t target, uint32_t barrier) const {
    constexpr uint32_t kElements = kLayoutTiles * T::kTileBytes, kScales = kLayoutTiles * T::kScaleTileBytes;
    if (lane == 0) barrierArriveExpect(barrier, static_cast<uint32_t>(groups) * (kElements + kScales));
    __syncwarp();
    if (lane >= groups) return;
    bulkLoad(target + lane * kElements, p.weights + block * kElements, kElements, barrier);
    if constexpr (kScales > 0) {
      bulkLoad(target + T::kElementBytes + lane * kScales, p.blockScales + block * kScales, kScales, barrier);
    }
  }
  // Where this lane's tokens lie; not before the predecessor has ended.
  __device__ void findTokens() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane + 32 * i;
      if (row < count) token[i] = p.rowToken == nullptr ? first + row : p.rowToken[first + row];
    }
  }
  // Columns beyond K become zeros. Tokens beyond the count stay what they are: they end in columns of the product that
  // nobody stores.
  __device__ void copyTokens(uint32_t target, uint32_t barrier) const {
    const int piece = lane % kRowPieces;
    const int left = (p.columns - step * Format::kStepColumns) * 2 - piece * 16;
    const uint32_t valid = left >= 16 ? 16u : (left > 0 ? static_cast<uint32_t>(left) : 0u);
    const auto* in = static_cast<const uint16_t*>(p.in) + (valid == 0 ? 0 : step * Format::kStepColumns + piece * 8);
    const uint32_t at = target + T::kWeightBytes;
    for (int begin = 0; begin < count; begin += kRowsAtOnce) {
      const int row = begin + lane / kRowPieces;
      const int32_t low = __shfl_sync(0xffffffffu, token[0], row % 32);
      const int32_t high = __shfl_sync(0xffffffffu, token[1], row % 32);
      const int64_t place = row < 32 ? low : high;
      if (row < count) pieceLoadPart(at + T::pieceOffset(row, piece), in + place * p.inStride, valid);
    }
    loadsArrive(barrier);
  }
};

// The producer's life. Where the plan is there before the predecessor has ended, the first stages' weights come first.
template <class T>
__device__ __forceinline__ void produce(const GroupedParams& p, BlockState& state, uint32_t ring) {
  int ahead = 0;  // steps whose weights are on their way
  if (p.weightsFirst) {
    Producer<T> early(p, state);
    while (early.count > 0) {
      early.copyWeights(ring + ahead * p.stageBytes, sharedAddress(&state.full[ahead]));
      if (++ahead == p.stages) break;
      early.advance(ahead);
    }
    waitForPredecessor();
  }
  Producer<T> producer(p, state);
  Cursor cursor;
  bool entered = true;
  for (int done = 0; producer.count > 0; ++done) {
    const uint32_t full = sharedAddress(&state.full[cursor.stage]);
    const uint32_t target = ring + static_cast<uint32_t>(cursor.stage * p.stageBytes);
    if (entered) producer.findTokens();
    if (done >= ahead) producer.copyWeights(target, full);
    producer.copyTokens(target, full);
    cursor.advance(p.stages);
    barrierWait(sharedAddress(&state.empty[cursor.stage]), cursor.parity ^ 1);
    entered = producer.advance(cursor.stage);
  }
  const uint32_t last = sharedAddress(&state.full[cursor.stage]);
  barrierArrive(last);
  if (producer.lane == 0) barrierArrive(last);
  loadsDrain();
}

}  // namespace replayssm
