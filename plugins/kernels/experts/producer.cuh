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

// A lane copies the weights of one tile of the round and the columns of the tokens lane and lane + 32.
template <class T>
struct Producer {
  using Format = typename T::Format;

  const GroupedParams& p;
  BlockState& state;
  int lane, index, round, step, first, count;
  uint32_t stepBytes;    // of all weights of a step
  int64_t block;         // tile and block of columns of this lane's copy, -1: none
  const uint16_t* token[2];

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
    const int left = p.tiles - round * T::kRoundTiles;
    const int tiles = left < T::kRoundTiles ? left : T::kRoundTiles;
    stepBytes = static_cast<uint32_t>(tiles) * (T::kTileBytes + T::kScaleTileBytes);
    block = -1;
    if (lane < tiles && count > 0) {
      block = (static_cast<int64_t>(entry.expert) * p.tiles + round * T::kRoundTiles + lane) * p.steps;
    }
  }
  // To the next step, which goes to `stage`. Returns whether it begins a round.
  __device__ bool advance(int stage) {
    if (block >= 0) ++block;
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
    if (lane == 0) barrierArriveExpect(barrier, stepBytes);
    __syncwarp();
    if (block < 0) return;
    const int warp = lane % T::kWarps, i = lane / T::kWarps;
    const uint32_t own = target + warp * T::kWarpBytes;
    bulkLoad(own + i * T::kTileBytes, p.weights + block * T::kTileBytes, T::kTileBytes, barrier);
    if constexpr (T::kScaleTileBytes > 0) {
      bulkLoad(own + kWarpTiles * T::kTileBytes + i * T::kScaleTileBytes, p.blockScales + block * T::kScaleTileBytes,
               T::kScaleTileBytes, barrier);
    }
  }
  // Where this lane's tokens lie; not before the predecessor has ended.
  __device__ void findTokens() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane + 32 * i;
      if (row >= count) continue;
      const int64_t place = p.rowToken == nullptr ? first + row : p.rowToken[first + row];
      token[i] = static_cast<const uint16_t*>(p.in) + place * p.inStride;
    }
  }
  // Columns beyond K become zeros. Tokens beyond the count stay what they are: they end in columns of the product that
  // nobody stores.
  __device__ void copyTokens(uint32_t target, uint32_t barrier) const {
    const int left = (p.columns - step * Format::kStepColumns) * 2;
    const int bytes = left < T::kColumnBytes ? (left > 0 ? left : 0) : T::kColumnBytes;
    const uint32_t rows = target + T::kWeightBytes + lane * T::kTokenBytes;
    if (bytes < T::kColumnBytes) clearTokens(rows, bytes);
    if (lane == 0) barrierArriveExpect(barrier, static_cast<uint32_t>(count * bytes));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (lane + 32 * i >= count || bytes == 0) continue;
      bulkLoad(rows + i * 32 * T::kTokenBytes, token[i] + step * Format::kStepColumns, bytes, barrier);
    }
  }
  // HAZARD: ordinary stores to what bulk copies wrote and will write: fenced on both sides.
  __device__ void clearTokens(uint32_t rows, int begin) const {
    asyncProxyFence();
    for (int i = 0; lane + 32 * i < count; ++i) {
      for (int byte = begin; byte < T::kColumnBytes; byte += 16) {
        const uint32_t at = rows + i * 32 * T::kTokenBytes + byte;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
      }
    }
    asyncProxyFence();
    __syncwarp();
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
  if (producer.lane == 0) {
    for (int i = 0; i < kFullArrivals; ++i) barrierArrive(sharedAddress(&state.full[cursor.stage]));
  }
}

}  // namespace replayssm
