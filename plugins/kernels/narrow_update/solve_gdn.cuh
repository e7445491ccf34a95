// The flush of plain decoding of the gated delta rule. With S the checkpoint, A_j the decay up to record j, r_j = A_j S
// k_j and M_jl = beta_j (decay from l to j) k_j k_l for l < j, the corrections are u = (I + M)^-1 beta (v - r). What is
// folded is u weighted with its decay to the end, so one matrix W of a head takes v - r there, for all of the head's
// slabs.
//
// Records are in the order of a product's columns: number m is record m / 2 % 4 + 4 (m % 2) + 8 (m / 8), so that the
// lane with columns 2c, 2c + 1 of both tiles has records c, c + 4, c + 8, c + 12, which the fold asks for.
#pragma once

#include "fold.cuh"
#include "part.cuh"

namespace replayssm {

// A head's W as right operands of both tiles, in three parts, then what recalled values are multiplied by, -A_j / |k_j|
// (less the scale of key halves), and the decay of all records.
struct HeadSolve {
  static constexpr int kFactorOffset = 3 * 512, kTotalOffset = kFactorOffset + 64, kBytes = kTotalOffset + 16;
  char* at;

  __device__ __forceinline__ uint4* part(int i, int lane) const {
    return reinterpret_cast<uint4*>(at + 512 * i) + lane;
  }
  __device__ __forceinline__ float* matrix() const { return reinterpret_cast<float*>(at); }  // before its split
  __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(at + kFactorOffset); }
  __device__ __forceinline__ float* total() const { return reinterpret_cast<float*>(at + kTotalOffset); }
};

// Number of a record, and record of a number, in the order above.
__device__ __forceinline__ constexpr int numberOf(int record) {
  return record % 4 * 2 + record / 4 % 2 + record / 8 * 8;
}
__device__ __forceinline__ constexpr int recordOf(int number) {
  return number / 2 % 4 + number % 2 * 4 + number / 8 * 8;
}

// All of the part's heads, a warp a head. Lane l makes column l of W, by forward substitution in (I + M) x = e_l: y_m
// is x_m decayed to the present record, in the end the last one.
template <class Traits>
__device__ __forceinline__ void solveHeads(const Part<Traits>& part) {
  static_assert(HeadSolve::kBytes == Traits::kSolveBytes, "room for a head's");
  const int lane = part.lane, column = lane % 16;
#pragma unroll 1
  for (int index = part.warp; index < part.heads; index += Traits::kWarps) {
    const Part<Traits> group = part.inGroup(part.groupOf(index));
    const HeadSolve solve{part.solves(index)};
    const float *log = part.dt(index), *beta = part.beta(index), *gram = group.gram(), *factors = group.factors();
    float y[16], total = 1.0f, before = 1.0f;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const bool real = j < part.pending;
      const float alpha = real ? expf(log[j]) : 1.0f;
      float sum = 0.0f;
#pragma unroll
      for (int m = 0; m < j; ++m) {
        y[m] *= alpha;
        sum = fmaf(gram[16 * j + m], y[m], sum);
      }
      y[j] = (column == j ? 1.0f : 0.0f) - (real ? beta[j] * sum : 0.0f);
      total *= alpha;
      if (column == j) before = total;
    }
    const bool real = column < part.pending;
    const float own = real ? beta[column] : 0.0f;
    __syncwarp();
    if (lane < 16) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        solve.matrix()[numberOf(j) * 16 + numberOf(column)] = j < part.pending ? y[j] * factors[j] * own : 0.0f;
      }
      const float* halves = part.halfFactors(part.groupOf(index));
      const float factor = Traits::kRecallsCodes ? halves[numberOf(column)] : factors[column];
      solve.factors()[numberOf(column)] = real ? -before * factor : 0.0f;
      if (lane == 0) *solve.total() = total;
    }
    __syncwarp();
    const float* row = solve.matrix() + lane / 4 * 16 + 2 * (lane % 4);
    WeightParts<__nv_bfloat16, 4> parts;
    parts.set({row[0], row[1], row[8], row[9], row[128], row[129], row[136], row[137]});
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      *solve.part(i, lane) = make_uint4(parts.part[i][0], parts.part[i][1], parts.part[i][2], parts.part[i][3]);
    }
  }
}

// weighted: what is folded of records c, c + 4, c + 8, c + 12 in rows g and g + 8; recall: S k of the records by
// number, undecayed; scale: of rows g and g + 8; values: the slab's 16 columns of the records' raw values.
template <class Traits>
__device__ __forceinline__ void solveSlab(float (&weighted)[4][2], const float (&recall)[2][4], const float2& scale,
                                          const HeadSolve& solve, const char* values, int pending, int lane) {
  using A = Activation<typename Traits::Act>;
  float rest[8];
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const float2 factor = *reinterpret_cast<const float2*>(solve.factors() + 8 * tile + 2 * (lane % 4));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int record = lane % 4 + 4 * (e % 2) + 8 * tile;
      float v = 0.0f;
      if (record < pending) {
        v = A::toFloat(*reinterpret_cast<const uint16_t*>(values + record * Traits::kSlabValuePitch +
                                                          (lane / 4 + 8 * (e / 2)) * 2));
      }
      const float own = (e % 2 == 0 ? factor.x : factor.y) * (e / 2 == 0 ? scale.x : scale.y);
      rest[4 * tile + e] = fmaf(own, recall[tile][e], v);
    }
  }
  WeightParts<__nv_bfloat16, 4> x;
  x.set(rest);
  float sum[2][4] = {};
#pragma unroll
  for (int i = 2; i >= 0; --i) {  // of W, the least first; with what is not less than 2^-24 of the largest
    const uint4 w = *solve.part(i, lane);
#pragma unroll
    for (int part = 2 - i; part >= 0; --part) {
      mmaAct<__nv_bfloat16>(sum[0], x.part[part], w.x, w.y);
      mmaAct<__nv_bfloat16>(sum[1], x.part[part], w.z, w.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) weighted[i / 4 * 2 + i % 2][i / 2 % 2] = sum[i / 4][i % 4];
}

}  // namespace replayssm
