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

// State traffic is used once: it should leave the caches to the step's inputs, which every head of a group reads.
__device__ __forceinline__ float4 loadOnce(const float* at) {
  float4 v;
  asm volatile("ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
  return v;
}

__device__ __forceinline__ void storeOnce(float* at, const float4& v) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

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
struct TokenInputs {
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
  const ConventionalParams& p;
  const int row, head, part, lane;

  __device__ TokenInputs load(int token) const {
    const int group = head / p.headsPerGroup;
    auto at = [&](const TokenTensor& t, int unit) {
      return static_cast<int64_t>(row) * t.rowStride + token * t.tokenStride + unit * t.headStride;
    };
    TokenInputs in{};
    in.k = __ldg(reinterpret_cast<const uint2*>(static_cast<const Act*>(p.k.data) + at(p.k, group)) + lane);
    in.q = __ldg(reinterpret_cast<const uint2*>(static_cast<const Act*>(p.q.data) + at(p.q, group)) + lane);
    in.value = __ldg(static_cast<const uint16_t*>(p.value.data) + at(p.value, head) + part * kRows +
                     lane / kLanesPerRow);
    in.dt = __ldg(static_cast<const float*>(p.dt.data) + at(p.dt, head));
    if constexpr (kGdn) in.beta = __ldg(static_cast<const float*>(p.beta.data) + at(p.beta, head));
    return in;
  }

  // Applies the token to the rows and returns the output of this lane's row.
  __device__ float apply(float4 (&s)[kRows], const TokenInputs& in, float a, float skip) const {
    const float4 k = columns<Act>(in.k), q = columns<Act>(in.q);
    const float value = Activation<Act>::toFloat(in.value);
    float sums[kRows];
    if constexpr (kGdn) {
      constexpr float kEps = 1e-6f;
      const float keyScale = rsqrtf(warpSum(dot(k, k)) + kEps);
      const float queryScale = rsqrtf((warpSum(dot(q, q)) + kEps) * kConventionalStateDim);
      const float coupling = warpSum(dot(k, q)) * keyScale * queryScale;
      const float decay = expf(in.dt);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = dot(s[r], k);
      const float recalled = reduceRows(sums, lane) * decay * keyScale;
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = dot(s[r], q);
      const float old = reduceRows(sums, lane) * decay * queryScale;
      const float correction = in.beta * (value - recalled);
      addOuter(s, decay, correction * keyScale, k);
      return fmaf(correction, coupling, old);
    } else {
      addOuter(s, expf(in.dt * a), in.dt * value, k);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] = dot(s[r], q);
      return fmaf(skip, value, reduceRows(sums, lane));
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

template <class Act, bool kGdn, int kRows>
__global__ void __launch_bounds__(kRows > 8 ? 256 : 512) conventionalKernel(const __grid_constant__ ConventionalParams p) {
  const int lane = threadIdx.x % 32, parts = p.headDim / kRows;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  releaseDependents();
  waitForPredecessor();
  const int64_t item = unit / parts;
  const int row = static_cast<int>(item / p.heads);
  if (row >= p.rows) return;
  const RowBlock<Act, kGdn, kRows> block{p, row, static_cast<int>(item - static_cast<int64_t>(row) * p.heads),
                                         static_cast<int>(unit - item * parts), lane};
  const int slot = __ldg(p.slot + row * p.slotStride);
  const int tokens = slot < 0 ? 0 : min(max(__ldg(p.numTokens + row * p.numTokensStride), 0), p.tokens);
  if (tokens > 0) {
    int entry = p.entry == nullptr ? 0 : __ldg(p.entry + slot);
    float* const state = p.state + slot * p.stateSlotStride +
                         (static_cast<int64_t>(block.head) * p.headDim + block.part * kRows) * kConventionalStateDim +
                         lane * 4;
    float4 s[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      s[r] = loadOnce(state + entry * p.stateEntryStride + r * kConventionalStateDim);
    }
    TokenInputs next = block.load(0);
    const float a = kGdn ? 0.0f : __ldg(p.a + block.head);
    const float skip = kGdn || p.skip == nullptr ? 0.0f : __ldg(p.skip + block.head);
#pragma unroll 1
    for (int token = 0; token < tokens; ++token) {
      const TokenInputs in = next;
      if (token + 1 < tokens) next = block.load(token + 1);
      const float out = block.apply(s, in, a, skip);
      entry = entry + 1 < p.entries ? entry + 1 : 0;
      float* const target = state + entry * p.stateEntryStride;
#pragma unroll
      for (int r = 0; r < kRows; ++r) storeOnce(target + r * kConventionalStateDim, s[r]);
      block.storeOutput(token, out);
    }
  }
  for (int token = tokens; token < p.tokens; ++token) block.storeOutput(token, 0.0f);
}

}  // namespace replayssm
