// Plain decoding of the gated delta rule in windows of up to 16 records: what flushes and other steps (stream_gdn.cuh)
// share, and the start of a flush, whose part may be of several groups. Vector 0 is the token's key, vector 1 its query.
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

// Eight columns of the token's key (lanes 0 to 15) or query, and what all lanes know of both vectors.
template <class Traits>
struct VectorPiece {
  float x[8];
  float largest;  // magnitude of the lane's vector
  float factor;   // of the lane's vector: 1 / |k| or 1 / (|q| sqrt(N))
  float product;  // of both, with both factors

  // The lane's piece of its own vector, and of the other one.
  __device__ __forceinline__ VectorPiece(const uint4& own, const uint4& other, int lane) {
    using A = Activation<typename Traits::Act>;
    const uint32_t words[4] = {own.x, own.y, own.z, own.w}, others[4] = {other.x, other.y, other.z, other.w};
    float squares = 0.0f, dot = 0.0f;
    largest = 0.0f;
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
    factor = 1.0f / (lane < 16 ? norm : norm * sqrtf(static_cast<float>(Traits::kStateDim)));
    product = factor * __shfl_xor_sync(kAllLanes, factor, 16) * dot;
  }
};

// Which eight columns, so that lane 16 v + 4 c + i has those of vector v that lane c of a product with the read copy takes
// in steps 2i and 2i + 1.
template <class Traits>
__device__ __forceinline__ int vectorPiece(int lane) {
  return StateReader<Traits::kRead>::column(lane % 4 * 2, lane / 4 % 4, 0) / 8;
}

// Appends the factor of a group's new key.
__device__ __forceinline__ void appendKeyFactor(const UpdateParams& p, int slot, int group, int ringRow, float factor) {
  p.ringKeyFactor[slot * p.ringKeyFactorSlotStride + static_cast<int64_t>(group) * p.ringRows + ringRow] = factor;
}

// What a group's key and query are to everybody on a flush, by one warp. norms[0] = 1 / |k|, norms[1] = 1 / (|q| sqrt(N)),
// norms[2]: their product with both factors. Appends the key's factor.
template <class Traits>
__device__ __forceinline__ void makeVectors(const Part<Traits>& part) {
  const int lane = part.lane, vector = lane / 16;
  const auto piece = [&](int v) { return *reinterpret_cast<const uint4*>(part.vectorRow(v) + vectorPiece<Traits>(lane) * 16); };
  const VectorPiece<Traits> own(piece(vector), piece(1 - vector), lane);
  if (lane % 16 == 0) part.norms()[vector] = own.factor;
  if (lane == 0) {
    part.norms()[2] = own.product;
    if (part.firstHead <= part.group * part.p.headsPerGroup) {
      appendKeyFactor(part.p, part.slot, part.group, part.ringRow(part.pending), own.factor);
    }
  }
}

// The vectors of all of a part's groups; appends the keys.
template <class Traits>
__device__ __forceinline__ void prepareGroups(const Part<Traits>& part) {
#pragma unroll 1
  for (int index = part.warp; index < part.groups; index += Traits::kWarps) {
    const Part<Traits> group = part.inGroup(index);
    makeVectors(group);
    group.appendKeys(part.lane);
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
  const __half rounded = roundedCorrection(exact);
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
