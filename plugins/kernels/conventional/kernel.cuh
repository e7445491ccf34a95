// The conventional step of both families: a warp holds some rows of one head's state in registers, applies the step's
// tokens one after another and writes the rows after each.
//
// Lane l owns columns 4l..4l+3 of every row, so a row is one 512-byte access of the warp. Row sums over the columns are
// reduced by halving: after log2(rows) exchanges each lane holds one row's partial sum (see rowOf), the rest is plain.
#pragma once

#include <cuda_runtime.h>

#include "../common/activation.cuh"
#include "../common/mbarrier.cuh"
#include "params.h"

namespace replayssm {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ float dot(const float4& a, const float4& b) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

__device__ __forceinline__ float warpSum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kFullWarp, v, d);
  return v;
}

// Sums kRows values over the warp; lane l receives the sum of row l / (32 / kRows).
template <int kRows, int kDistance = 16>
__device__ __forceinline__ float reduceRows(const float (&v)[kRows], int lane) {
  if constexpr (kRows == 1) {
    float sum = v[0];
#pragma unroll
    for (int d = kDistance; d > 0; d /= 2) sum += __shfl_xor_sync(kFullWarp, sum, d);
    return sum;
  } else {
    const bool upper = (lane & kDistance) != 0;
    float half[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      float give = upper ? v[i] : v[i + kRows / 2];
      float keep = upper ? v[i + kRows / 2] : v[i];
      half[i] = keep + __shfl_xor_sync(kFullWarp, give, kDistance);
    }
    return reduceRows<kRows / 2, kDistance / 2>(half, lane);
  }
}

// One token's inputs as a warp needs them.
struct Token {
  uint2 k, q;      // this lane's four columns
  uint16_t value;  // of this lane's row
  float dt, beta;
};

template <class Act>
__device__ __forceinline__ float4 columns(const uint2& packed) {
  using A = Activation<Act>;
  return make_float4(A::low(packed.x), A::high(packed.x), A::low(packed.y), A::high(packed.y));
}

// Rows kRows * part .. of head `head` of batch row `row`.
template <class Act, bool kGdn, int kRows>
struct RowBlock {
  static constexpr int kLanesPerRow = 32 / kRows;
  const StepParams& p;
  const int row, head, part, lane;

  // Of a warp's unit of work, units numbered over rows, heads and parts; row = B and more: nothing to do.
  static __device__ RowBlock of(const StepParams& p) {
    const int parts = p.headDim / kRows;
    const int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    const int64_t item = unit / parts;
    const int row = static_cast<int>(item / p.heads);
    return {p, row, static_cast<int>(item - static_cast<int64_t>(row) * p.heads), static_cast<int>(unit - item * parts),
            static_cast<int>(threadIdx.x % 32)};
  }

  // Slot of the row, -1 for padding and beyond the batch.
  __device__ int slot() const { return row < p.rows ? __ldg(p.slot + row * p.slotStride) : -1; }

  __device__ int tokens() const { return min(max(__ldg(p.numTokens + row * p.numTokensStride), 0), p.tokens); }

  // The block's columns of this lane in a slot's state.
  __device__ float* place(const StateTensor& state, int slot) const {
    return state.data + slot * state.slotStride +
           (static_cast<int64_t>(head) * p.headDim + part * kRows) * kConventionalStateDim + lane * 4;
  }

  __device__ float rate() const { return kGdn ? 0.0f : __ldg(p.a + head); }
  __device__ float skip() const { return kGdn || p.skip == nullptr ? 0.0f : __ldg(p.skip + head); }

  // kQuery: whether the token has a query.
  template <bool kQuery = true>
  __device__ Token load(const TokenInputs& inputs, int token) const {
    const int group = head / p.headsPerGroup;
    auto at = [&](const TokenTensor& t, int unit) {
      return static_cast<int64_t>(row) * t.rowStride + token * t.tokenStride + unit * t.headStride;
    };
    Token in{};
    in.k = __ldg(reinterpret_cast<const uint2*>(static_cast<const Act*>(inputs.k.data) + at(inputs.k, group)) + lane);
    if constexpr (kQuery) {
      in.q = __ldg(reinterpret_cast<const uint2*>(static_cast<const Act*>(inputs.q.data) + at(inputs.q, group)) + lane);
    }
    in.value = __ldg(static_cast<const uint16_t*>(inputs.value.data) + at(inputs.value, head) + part * kRows +
                     lane / kLanesPerRow);
    in.dt = __ldg(static_cast<const float*>(inputs.dt.data) + at(inputs.dt, head));
    if constexpr (kGdn) in.beta = __ldg(static_cast<const float*>(inputs.beta.data) + at(inputs.beta, head));
    return in;
  }

  static __device__ void read(float4 (&s)[kRows], const float* at) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) s[r] = *reinterpret_cast<const float4*>(at + r * kConventionalStateDim);
  }

  static __device__ void write(float* at, const float4 (&s)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) *reinterpret_cast<float4*>(at + r * kConventionalStateDim) = s[r];
  }

  // Applies the token to the rows and returns the output of this lane's row; kQuery: whether there is one.
  template <bool kQuery = true>
  __device__ float apply(float4 (&s)[kRows], const Token& in, float a, float skip) const {
    const float4 k = columns<Act>(in.k), q = columns<Act>(in.q);
    const float value = Activation<Act>::toFloat(in.value);
    float sums[kRows];
    if constexpr (kGdn) {
      constexpr float kEps = 1e-6f;
      const float keyScale = rsqrtf(warpSum(dot(k, k)) + kEps);
      const float decay = expf(in.dt);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = dot(s[r], k);
      const float recalled = reduceRows(sums, lane) * decay * keyScale;
      const float correction = in.beta * (value - recalled);
      float out = 0.0f;
      if constexpr (kQuery) {
        const float queryScale = rsqrtf((warpSum(dot(q, q)) + kEps) * kConventionalStateDim);
        const float coupling = warpSum(dot(k, q)) * keyScale * queryScale;
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r] = dot(s[r], q);
        out = fmaf(correction, coupling, reduceRows(sums, lane) * decay * queryScale);
      }
      addOuter(s, decay, correction * keyScale, k);
      return out;
    } else {
      addOuter(s, expf(in.dt * a), in.dt * value, k);
      if constexpr (kQuery) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) sums[r] = dot(s[r], q);
        return fmaf(skip, value, reduceRows(sums, lane));
      } else {
        return 0.0f;
      }
    }
  }

  // s = decay s + weight k^T, `weight` held by the lanes of its row.
  __device__ void addOuter(float4 (&s)[kRows], float decay, float weight, const float4& k) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float w = __shfl_sync(kFullWarp, weight, r * kLanesPerRow);
      s[r].x = fmaf(w, k.x, decay * s[r].x);
      s[r].y = fmaf(w, k.y, decay * s[r].y);
      s[r].z = fmaf(w, k.z, decay * s[r].z);
      s[r].w = fmaf(w, k.w, decay * s[r].w);
    }
  }

  __device__ void storeOutput(int token, float value) const {
    if (lane % kLanesPerRow != 0) return;
    uint16_t* out = static_cast<uint16_t*>(p.out) + row * p.outRowStride + token * p.outTokenStride +
                    head * p.outHeadStride + part * kRows + lane / kLanesPerRow;
    *out = Activation<Act>::fromFloat(value);
  }
};

// kSingle: T = 1, which needs no registers for a token ahead.
template <class Act, bool kGdn, int kRows, bool kSingle>
__global__ void __launch_bounds__(kRows > 8 ? 256 : 512)
    conventionalKernel(const __grid_constant__ ConventionalParams p) {
  waitForPredecessor();
  const auto block = RowBlock<Act, kGdn, kRows>::of(p);
  if (block.row >= p.rows) return;
  const int slot = block.slot();
  const int tokens = slot < 0 ? 0 : block.tokens();
  if (tokens > 0) {
    int entry = p.entry == nullptr ? 0 : __ldg(p.entry + slot);
    float* const state = block.place(p.state, slot);
    float4 s[kRows];
    block.read(s, state + entry * p.entryStride);
    Token next = block.load(p.inputs, 0);
    const float a = block.rate(), skip = block.skip();
    releaseDependents();  // their start should not delay these loads
#pragma unroll 1
    for (int token = 0; token < (kSingle ? 1 : tokens); ++token) {
      const Token in = next;
      if (!kSingle && token + 1 < tokens) next = block.load(p.inputs, token + 1);
      const float out = block.apply(s, in, a, skip);
      entry = entry + 1 < p.entries ? entry + 1 : 0;
      block.write(state + entry * p.entryStride, s);
      block.storeOutput(token, out);
    }
  }
  for (int token = tokens; token < (kSingle ? 1 : p.tokens); ++token) block.storeOutput(token, 0.0f);
}

// From `source`: cached tokens without outputs, the state after them to `recovered`, the step's tokens, the state after
// those to `end`.
template <class Act, bool kGdn, int kRows>
__global__ void __launch_bounds__(kRows > 8 ? 256 : 512) recoveryKernel(const __grid_constant__ RecoveryParams p) {
  const auto block = RowBlock<Act, kGdn, kRows>::of(p);
  if (block.row >= p.rows) return;
  const int slot = block.slot();
  const int tokens = slot < 0 || p.tokens == 0 ? 0 : block.tokens();
  if (slot >= 0) {
    float4 s[kRows];
    block.read(s, block.place(p.source, slot));
    const float a = block.rate(), skip = block.skip();
    const int replayed = p.maxReplayed == 0
                             ? 0
                             : min(max(__ldg(p.replayed + block.row * p.replayedStride), 0), p.maxReplayed);
#pragma unroll 1
    for (int token = 0; token < replayed; ++token) {
      block.template apply<false>(s, block.template load<false>(p.cached, token), a, skip);
    }
    if (p.recovered.data != nullptr) block.write(block.place(p.recovered, slot), s);
#pragma unroll 1
    for (int token = 0; token < tokens; ++token) {
      block.storeOutput(token, block.apply(s, block.load(p.inputs, token), a, skip));
    }
    if (p.end.data != nullptr) block.write(block.place(p.end, slot), s);
  }
  for (int token = tokens; token < p.tokens; ++token) block.storeOutput(token, 0.0f);
}

}  // namespace replayssm
