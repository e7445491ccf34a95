// Plain decoding of the gated delta rule in windows of up to 16 records. A part may be of several groups: a warp makes
// the vectors of one, its neighbour the products of the same group's records with them.
//
// Vector 0 is the token's key, vector 1 its query. Whatever sums over a state row's columns ends as eight products a
// row, column 2c + v of them lane c's share of vector v; they are added up while rows are dealt out to lanes, so that
// each lane finishes rows of its own.
#pragma once

#include "../common/gdn.cuh"
#include "part.cuh"

namespace replayssm {

// Starts keys, queries and committed keys' factors of the part's groups.
template <class Traits>
__device__ __forceinline__ void loadGroups(const Part<Traits>& part) {
  using Act = typename Traits::Act;
  static_assert(Traits::kWarps == 8 && Traits::kStateDim == 128, "two rows a warp and pass");
  const UpdateParams& p = part.p;
  const int shift = part.groups / 2;  // groups: 1, 2 or 4
  const int warps = Traits::kWarps >> shift, own = part.warp & (warps - 1), piece = part.lane % 16;
  const Part<Traits> group = part.inGroup(part.warp >> (3 - shift));
  const Act* ring = static_cast<const Act*>(p.ringKey) + part.slot * p.ringKeySlotStride +
                    static_cast<int64_t>(group.group) * p.ringRows * Traits::kStateDim + piece * 8;
  const auto token = [&](const TokenTensor& x) {
    return static_cast<const Act*>(x.data) + part.row * x.rowStride + group.group * x.headStride + piece * 8;
  };
  const Act *key = token(p.k), *query = token(p.q);
  const uint32_t target = sharedAddress(group.keys()) + piece * 16;
#pragma unroll 1
  for (int record = 2 * own + part.lane / 16; record < part.pending + 2; record += 2 * warps) {
    const Act* source = ring + part.ringRow(record) * Traits::kStateDim;
    if (record >= part.pending) source = record == part.pending ? key : query;
    pieceLoad(target + (record <= part.pending ? record : p.window + 1) * Traits::kKeyPitch, source);
  }
  const float* factor = p.ringKeyFactor + part.slot * p.ringKeyFactorSlotStride +
                        static_cast<int64_t>(group.group) * p.ringRows;
  if (own == 0 && part.lane < part.pending) {
    wordLoad(sharedAddress(group.factors() + part.lane), factor + part.ringRow(part.lane));
  }
}

// What a group's key and query are to everybody, by one warp. norms[0] = 1 / |k|, norms[1] = 1 / (|q| sqrt(N)),
// norms[2]: their product with both factors. Appends the key's factor. fragments: both as right operands of the read
// copy's columns, scaled by a power of two as QueryFragments says; lane 16 v + 4 c + i of here holds steps 2i, 2i + 1
// of lane c there.
template <class Traits>
__device__ __forceinline__ void makeVectors(const Part<Traits>& part) {
  using A = Activation<typename Traits::Act>;
  using Reader = StateReader<Traits::kRead>;
  const int lane = part.lane, vector = lane / 16;
  const int piece = Reader::column(lane % 4 * 2, lane / 4 % 4, 0) / 8;
  const uint4 own = *reinterpret_cast<const uint4*>(part.vectorRow(vector) + piece * 16);
  const uint4 other = *reinterpret_cast<const uint4*>(part.vectorRow(1 - vector) + piece * 16);
  const uint32_t words[4] = {own.x, own.y, own.z, own.w}, others[4] = {other.x, other.y, other.z, other.w};
  float x[8], squares = 0.0f, dot = 0.0f, largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = A::low(words[i]);
    x[2 * i + 1] = A::high(words[i]);
    squares = fmaf(x[2 * i + 1], x[2 * i + 1], fmaf(x[2 * i], x[2 * i], squares));
    dot = fmaf(x[2 * i + 1], A::high(others[i]), fmaf(x[2 * i], A::low(others[i]), dot));
    largest = fmaxf(largest, fmaxf(fabsf(x[2 * i]), fabsf(x[2 * i + 1])));
  }
#pragma unroll
  for (int d = 1; d < 16; d *= 2) {
    squares += __shfl_xor_sync(kAllLanes, squares, d);
    dot += __shfl_xor_sync(kAllLanes, dot, d);
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, d));
  }
  const float norm = sqrtf(squares + kNormEps);
  const float factor = 1.0f / (vector == 0 ? norm : norm * sqrtf(static_cast<float>(Traits::kStateDim)));
  const float both = factor * __shfl_xor_sync(kAllLanes, factor, 16);
  const UpdateParams& p = part.p;
  if (lane % 16 == 0) part.norms()[vector] = factor;
  if (lane == 0) {
    part.norms()[2] = both * dot;
    if (part.firstHead <= part.group * p.headsPerGroup) {
      p.ringKeyFactor[part.slot * p.ringKeyFactorSlotStride + static_cast<int64_t>(part.group) * p.ringRows +
                      part.ringRow(part.pending)] = factor;
    }
  }
  if (part.flushes()) return;
  const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23) - 127, -100);
  const float up = __uint_as_float(static_cast<uint32_t>(127 + 14 - exponent) << 23);
  uint32_t halves[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int first = Reader::column(i / 2, 0, i % 2 * 2), second = Reader::column(i / 2, 0, i % 2 * 2 + 1);
    const __half2 pair = __floats2half2_rn(x[first] * up, x[second] * up);
    halves[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  part.fragments()[lane] = make_uint4(halves[0], halves[1], halves[2], halves[3]);
  if (lane % 16 == 0) {
    part.fragmentFactors()[vector] = __uint_as_float(static_cast<uint32_t>(127 - 14 + exponent) << 23);
  }
}

// All that a part's groups need before its heads: vectors, and products of records with them or with each other.
template <class Traits>
__device__ __forceinline__ void prepareGroups(const Part<Traits>& part, bool flushes) {
#pragma unroll 1
  for (int task = part.warp; task < 2 * part.groups; task += Traits::kWarps) {
    const Part<Traits> group = part.inGroup(task / 2);
    if (task % 2 == 0) {
      makeVectors(group);
      group.appendKeys(part.lane);
    } else if (!flushes && part.pending > 0) {
      group.multiplyTile(group.dots(), 0, part.pending);
    }
  }
}

// Sums over the four lanes of a row's shares. x[m][2 half + v] of rows g + 8 half + 16 m becomes y[v] of the lane's own
// row g + 8 (c % 2) + 16 (c / 2).
__device__ __forceinline__ void dealRows(float (&y)[2], const float (&x)[2][4], int lane) {
  const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
  float row[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const float sent = odd ? x[m][v] : x[m][2 + v];
      row[m][v] = (odd ? x[m][2 + v] : x[m][v]) + __shfl_xor_sync(kAllLanes, sent, 1);
    }
  }
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const float sent = upper ? row[0][v] : row[1][v];
    y[v] = (upper ? row[1][v] : row[0][v]) + __shfl_xor_sync(kAllLanes, sent, 2);
  }
}

// One element: recalled[v], what state and committed records give for key and query; value: the token's raw value. The
// correction is rounded to float16 before it is used, and appended with the value; returns the output.
template <class Traits>
__device__ __forceinline__ float finishRow(const float (&recalled)[2], uint16_t value, float beta, float product,
                                           __half* corrections, uint16_t* values) {
  const float exact = beta * (Activation<typename Traits::Act>::toFloat(value) - recalled[0]);
  const __half rounded = __float2half_rn(fminf(fmaxf(exact, -kLargestHalf), kLargestHalf));
  *corrections = rounded;
  *values = value;
  return fmaf(product, __half2float(rounded), recalled[1]);
}

// Where an element of the token's lies in a head's inputs, rings and outputs.
template <class Traits>
struct TokenPlace {
  const uint16_t* value;
  __half* correction;
  uint16_t* raw;
  uint16_t* out;

  TokenPlace() = default;
  __device__ TokenPlace(const Part<Traits>& part, int head, int element) {
    const UpdateParams& p = part.p;
    const int at = part.ringRow(part.pending) * Traits::kHeadDim + element;
    value = reinterpret_cast<const uint16_t*>(part.tokenValues(head)) + element;
    correction = reinterpret_cast<__half*>(const_cast<typename Traits::Act*>(part.ringValues(head))) + at;
    raw = reinterpret_cast<uint16_t*>(part.ringInputs(head)) + at;
    out = static_cast<uint16_t*>(p.out) + part.row * p.outRowStride + head * p.outHeadStride + element;
  }
};

}  // namespace replayssm
