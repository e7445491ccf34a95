// The float32 state of a warp: 16 rows in registers, as accumulators of tiles of 8 columns; how it is read, advanced
// and written.
#pragma once

#include "source.cuh"

namespace replayssm {

template <int kStateDim>
struct WarpState {
  static constexpr int kTiles = kStateDim / 8;
  float tile[kTiles][4];  // rows lane / 4 and + 8, columns 2 (lane % 4) and + 1 of each tile

  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) tile[i][e] = 0.0f;
    }
  }

  // `from`: this lane's first element of the warp's 16 rows.
  __device__ __forceinline__ void read(const float* from) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float2 pair = *reinterpret_cast<const float2*>(from + r * 8 * kStateDim + i * 8);
        tile[i][2 * r] = pair.x;
        tile[i][2 * r + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ void write(float* to) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        *reinterpret_cast<float2*>(to + r * 8 * kStateDim + i * 8) = make_float2(tile[i][2 * r], tile[i][2 * r + 1]);
      }
    }
  }

  // The first product over the state's columns, and what else it is multiplied by: `use(step, part)` gets the operand
  // of columns 16 step.. .
  template <int kParts, class Use>
  __device__ __forceinline__ void operands(const Use& use) const {
#pragma unroll
    for (int step = 0; step < kStateDim / 16; ++step) {
      uint32_t part[kParts][4];
      splitOperand<kParts>(part, tile[2 * step], tile[2 * step + 1]);
      use(step, part);
    }
  }

  // S <- total S + values keys: `values` are the weighted values of some tokens in three parts, `keys` points at those
  // tokens' keys in shared memory. The sum over tokens is made apart from the state, then added by one fused
  // multiply-add an element, so that the accumulator's truncation never eats into an old state.
  template <class Act, int kSteps>
  __device__ __forceinline__ void advance(float total, const uint32_t (&values)[kSteps][3][4], uint32_t keys,
                                          int lane) {
    constexpr int kPitch = tilePitch(kStateDim), kPairs = 2;
    const uint32_t base = keys + rowsFirst(kPitch, lane);
#pragma unroll
    for (int i = 0; i < kTiles; i += 2 * kPairs) {
      float sum[2 * kPairs][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t key[kPairs][Parts<Act>::kCount][4];
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          uint32_t raw[4];
          loadTilesTransposed(raw, base + step * 16 * kPitch + (i + 2 * pair) * 16);
          splitActivations<Act>(key[pair], raw);
        }
        addProducts<3>(sum, values[step], key);
      }
#pragma unroll
      for (int t = 0; t < 2 * kPairs; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) tile[i + t][e] = fmaf(total, tile[i + t][e], sum[t][e]);
      }
    }
  }
};

// The head's state before the first chunk, warp rows first..first + 15.
template <int kStateDim>
__device__ __forceinline__ void readState(WarpState<kStateDim>& state, const PrefillParams& p,
                                          const HeadContext& context, int first, int lane) {
  const PromptRow& r = context.r;
  const int64_t at = (static_cast<int64_t>(context.head) * p.headDim + first + lane / 4) * kStateDim + 2 * (lane % 4);
  if ((r.flags & kFromZero) != 0) {
    state.zero();
  } else if ((r.flags & kFromCarry) != 0) {
    state.read(p.carry + r.carry * p.carryStride + at);
  } else if (p.staged != nullptr) {
    state.read(p.staged + static_cast<int64_t>(context.row) * p.heads * p.headDim * kStateDim + at);
  } else {
    state.read(p.checkpoint + r.slot * p.checkpointSlotStride + at);
  }
}

// The state after the last chunk.
template <int kStateDim>
__device__ __forceinline__ void writeState(const WarpState<kStateDim>& state, const PrefillParams& p,
                                           const HeadContext& context, int first, int lane) {
  const PromptRow& r = context.r;
  const int64_t at = (static_cast<int64_t>(context.head) * p.headDim + first + lane / 4) * kStateDim + 2 * (lane % 4);
  if ((r.flags & kToCarry) != 0) {
    state.write(p.carry + r.carry * p.carryStride + at);
  } else if (p.staged != nullptr) {
    state.write(p.staged + static_cast<int64_t>(context.row) * p.heads * p.headDim * kStateDim + at);
  } else {
    state.write(p.checkpoint + r.slot * p.checkpointSlotStride + at);
  }
}

}  // namespace replayssm
