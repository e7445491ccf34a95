// The weights of a head's records for the vectors of a step, computed once by one warp (a weigher) and read by all warps
// that own rows of the head's state.
//
// In shared memory, rows of kWeightPitch floats, one float a vector:
//   row 0                       what scales the state's part
//   row 1 + j                   committed record j, zero from h to the end of its tile of 8
//   row 1 + (h rounded up) + i  this step's token i
#pragma once

#include "../replay_update/consumer.cuh"
#include "traits.cuh"

namespace replayssm::weighed {

// Output of a head's first row and the step's first token.
template <class Traits>
__device__ __forceinline__ typename Traits::Act* outputOf(const UpdateParams& p, const ItemHeader& item) {
  return static_cast<typename Traits::Act*>(p.out) + item.row * p.outRowStride + item.head() * p.outHeadStride;
}

template <class Traits>
struct WeightRows {
  float* base;
  __device__ float* scale() const { return base; }
  __device__ float* record(int j) const { return base + (1 + j) * Traits::kWeightPitch; }
  __device__ float* token(int pending, int i) const { return record((pending + 7) / 8 * 8 + i); }
};

// sum holds the state times the vectors; lane (g, c) has vectors 2c and 2c + 1 of each tile.
template <class Traits>
__device__ __forceinline__ void scaleSums(float (&sum)[Traits::kTiles][4], const WeightRows<Traits>& rows, int lane) {
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
    const float2 scale = *reinterpret_cast<const float2*>(rows.scale() + 8 * tile + 2 * (lane % 4));
    sum[tile][0] *= scale.x;
    sum[tile][1] *= scale.y;
    sum[tile][2] *= scale.x;
    sum[tile][3] *= scale.y;
  }
}

// sum += values times weights for a tile of 8 records from `first` on; records from `count` on have finite weights.
template <class Traits, class Value>
__device__ __forceinline__ void addWeighed(float (&sum)[Traits::kTiles][4], const float* weights, const char* values,
                                           int first, int count, int lane) {
  const int record = first + 2 * (lane % 4);
  float x[4], w[Traits::kTiles][2];
  valueFragment<Traits, Value>(x, values, record, record + 1, count, lane);
#pragma unroll
  for (int tile = 0; tile < Traits::kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 2; ++e) w[tile][e] = weights[(record + e) * Traits::kWeightPitch + 8 * tile + lane / 4];
  }
  addValues<Traits>(sum, x, w);
}

}  // namespace replayssm::weighed
