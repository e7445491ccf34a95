// What both register layouts of the conventional step share: which rows of which head a warp has, and its scalars.
#pragma once

#include <cuda_runtime.h>

#include "../common/gdn.cuh"
#include "../common/input.cuh"
#include "../common/mbarrier.cuh"
#include "../common/row_math.cuh"
#include "params.h"

namespace replayssm {

// Rows kRows * part .. of head `head` of batch row `row`.
template <class ActType, bool kIsGdn, int kBlockRows>
struct Block {
  using Act = ActType;
  static constexpr bool kGdn = kIsGdn;
  static constexpr int kRows = kBlockRows;
  const StepParams& p;
  const int row, head, part, lane;

  // Of a warp's unit of work, units numbered over rows, heads and parts; row = B and more: nothing to do.
  static __device__ Block of(const StepParams& p) {
    const int parts = p.headDim / kRows;
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    const int64_t item = unit / parts;
    const int row = static_cast<int>(item / p.heads);
    return {p, row, static_cast<int>(item - static_cast<int64_t>(row) * p.heads), static_cast<int>(unit - item * parts),
            static_cast<int>(threadIdx.x % 32)};
  }

  __device__ float rate() const { return kGdn ? 0.0f : __ldg(p.a + head); }
  __device__ float skip() const { return kGdn || p.skip == nullptr ? 0.0f : __ldg(p.skip + head); }

  // The block's first element in a slot's state.
  __device__ float* state(const StateTensor& states, int slot) const {
    return states.data + slot * states.slotStride +
           (static_cast<int64_t>(head) * p.headDim + part * kRows) * kConventionalStateDim;
  }

  // Where a token's entry of a tensor lies, for a head or a group.
  __device__ int64_t at(const TokenTensor& t, int token, int unit) const {
    return static_cast<int64_t>(row) * t.rowStride + token * t.tokenStride + unit * t.headStride;
  }

  // A key or query of the head's group, eight bytes an index.
  __device__ const uint2* vector(const TokenTensor& t, int token) const {
    return reinterpret_cast<const uint2*>(static_cast<const Act*>(t.data) + at(t, token, head / p.headsPerGroup));
  }

  // The block's values.
  __device__ const uint16_t* values(const TokenTensor& t, int token) const {
    return static_cast<const uint16_t*>(t.data) + at(t, token, head) + part * kRows;
  }

  __device__ float scalar(const TokenTensor& t, int token) const {
    return loadInput(static_cast<const float*>(t.data) + at(t, token, head));
  }

  // The block's outputs.
  __device__ uint16_t* out(int token) const {
    return static_cast<uint16_t*>(p.out) + row * p.outRowStride + token * p.outTokenStride + head * p.outHeadStride +
           part * kRows;
  }
};

// A row's slot (-1: padding) and number of tokens; both loads are on their way before either is needed.
struct RowTokens {
  int slot, tokens;
  static __device__ RowTokens of(const StepParams& p, int row) {
    const int slot = __ldg(p.slot + row * p.slotStride), tokens = __ldg(p.numTokens + row * p.numTokensStride);
    return {slot, slot < 0 ? 0 : min(max(tokens, 0), p.tokens)};
  }
};

}  // namespace replayssm
