// Register layout for large batches: a row is one 512-byte access of the warp, lane l has columns 4l..4l+3 of every row.
//
// Row sums are reduced by halving: after log2(rows) exchanges each lane holds one row's partial sum, row
// lane / (32 / rows), and the rest is plain. Fewest instructions a row, longest chain.
#pragma once

#include "../common/store_again.cuh"
#include "block.cuh"

namespace replayssm {

template <class BlockType>
struct WideRows {
  using Act = typename BlockType::Act;
  static constexpr int kRows = BlockType::kRows, kLanesPerRow = 32 / kRows;
  using Rows = float4[kRows];
  using Outputs = float[1];  // of the lane's row
  struct Token {
    uint2 k, q;      // packed
    uint16_t value;  // of the lane's row
    float dt, beta;
  };
  const BlockType& block;

  __device__ float* place(const StateTensor& states, int slot) const {
    return block.state(states, slot) + block.lane * 4;
  }

  static __device__ void read(Rows& s, const float* at) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) s[r] = *reinterpret_cast<const float4*>(at + r * kConventionalStateDim);
  }

  static __device__ void write(float* at, const Rows& s) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) *reinterpret_cast<float4*>(at + r * kConventionalStateDim) = s[r];
  }

  // kQuery: whether the token has a query.
  template <bool kQuery>
  __device__ Token load(const TokenInputs& inputs, int token) const {
    Token in{};
    in.k = loadInput(block.vector(inputs.k, token) + block.lane);
    if constexpr (kQuery) in.q = loadInput(block.vector(inputs.q, token) + block.lane);
    in.value = loadInput(block.values(inputs.value, token) + block.lane / kLanesPerRow);
    in.dt = block.scalar(inputs.dt, token);
    if constexpr (BlockType::kGdn) in.beta = block.scalar(inputs.beta, token);
    return in;
  }

  // Applies the token to the rows; `out` is set where the token has a query.
  template <bool kQuery>
  __device__ void apply(Rows& s, Outputs& out, const Token& in, float a, float skip) const {
    const float4 k = unpack<Act>(in.k), q = unpack<Act>(in.q);
    const float value = Activation<Act>::toFloat(in.value);
    if constexpr (BlockType::kGdn) {
      const float keyScale = rsqrtf(warpSum(dot(k, k)) + kNormEps), decay = expf(in.dt);
      const float correction = in.beta * (value - recall(s, k) * decay * keyScale);
      if constexpr (kQuery) {
        const float queryScale = rsqrtf((warpSum(dot(q, q)) + kNormEps) * kConventionalStateDim);
        const float coupling = warpSum(dot(k, q)) * keyScale * queryScale;
        out[0] = fmaf(correction, coupling, recall(s, q) * decay * queryScale);
      }
      update(s, decay, correction * keyScale, k);
    } else {
      update(s, expf(in.dt * a), in.dt * value, k);
      if constexpr (kQuery) out[0] = fmaf(skip, value, recall(s, q));
    }
  }

  __device__ void store(int token, const Outputs& out) const {
    if (block.lane % kLanesPerRow != 0) return;
    storeAgain(block.out(token) + block.lane / kLanesPerRow, Activation<Act>::fromFloat(out[0]));
  }

 private:
  // The product of the lane's row and a vector.
  __device__ float recall(const Rows& s, const float4& vector) const {
    float sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = dot(s[r], vector);
    return reduceRows(sums, block.lane);
  }

  // weight: of the lane's row.
  static __device__ void update(Rows& s, float decay, float weight, const float4& k) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) addScaled(s[r], decay, __shfl_sync(kFullWarp, weight, r * kLanesPerRow), k);
  }
};

}  // namespace replayssm
