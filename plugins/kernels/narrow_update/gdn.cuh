// The gated delta rule with narrow states (paper, Alg. 5-6). Vector 2t of a step is token t's key, vector 2t + 1 its
// query, so lane (g, c) = (lane / 4, lane % 4) accumulates, for rows g and g + 8 of a slab and token c, what is
// recalled for the key (elements 0 and 2) and contributed to the output (1 and 3).
//
// Corrections in the ring come from a narrow read copy. A flush derives the committed ones anew from the high-precision
// checkpoint and the raw values, 16 records at a time, in float32 and without rounding; it folds these and uses them.
#pragma once

#include "../common/gdn.cuh"
#include "fold.cuh"
#include "part.cuh"
#include "plain_gdn.cuh"
#include "solve_gdn.cuh"

namespace replayssm {

// Factors of the step's vectors: 1 / |k|, 1 / (|q| sqrt(N)). By one warp, which also appends those of the keys.
template <class Traits>
__device__ __forceinline__ void setNorms(const Part<Traits>& part) {
  using A = Activation<typename Traits::Act>;
  const int vector = part.lane / 4, c = part.lane % 4, token = vector / 2;
  const char* row = part.vectorRow(min(vector, part.vectors() - 1)) + c * 16;
  float squares = 0.0f;
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    const uint4 piece = *reinterpret_cast<const uint4*>(row + b * 64);
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      squares = fmaf(A::low(words[i]), A::low(words[i]), fmaf(A::high(words[i]), A::high(words[i]), squares));
    }
  }
  squares += __shfl_xor_sync(kAllLanes, squares, 1);
  squares += __shfl_xor_sync(kAllLanes, squares, 2);
  const float norm = sqrtf(squares + kNormEps);
  const float factor = 1.0f / (vector % 2 == 0 ? norm : norm * sqrtf(static_cast<float>(Traits::kStateDim)));
  if (c != 0) return;
  const UpdateParams& p = part.p;
  part.norms()[vector] = vector < part.vectors() ? factor : 0.0f;
  if (vector % 2 == 0 && token < part.tokens && part.firstHead == part.group * p.headsPerGroup) {
    p.ringKeyFactor[part.slot * p.ringKeyFactorSlotStride + static_cast<int64_t>(part.group) * p.ringRows +
                    part.ringRow(part.pending + token)] = factor;
  }
}

// gram[16 j + l] of each 16 committed records: the product of keys j and l, with both factors. By all warps, for all
// groups of the part.
template <class Traits>
__device__ __forceinline__ void multiplyRecords(const Part<Traits>& part) {
  const int lane = part.lane, tiles = Traits::kOneToken ? 4 : (part.pending + 15) / 16 * 4;
  for (int task = part.warp; task < tiles * part.groups; task += Traits::kWarps) {
    const int i = Traits::kOneToken ? task % 4 : task;
    const Part<Traits> group = part.inGroup(Traits::kOneToken ? task / 4 : 0);
    const int first = i / 4 * 16, j = first + i / 2 % 2 * 8 + lane / 4, l = first + i % 2 * 8;
    Vectors<Traits> vectors{};
#pragma unroll
    for (int b = 0; b < Traits::kBlocks; ++b) {
      if (j < part.pending) {
        vectors.part[0][b] =
            *reinterpret_cast<const uint4*>(group.keys() + j * Traits::kKeyPitch + b * 64 + lane % 4 * 16);
      }
    }
    float dot[4];
    keyDots<Traits>(dot, group.keys(), min(l, part.pending - 1), part.pending, vectors, 0, lane);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int record = l + 2 * (lane % 4) + e;
      const bool real = j < part.pending && record < part.pending;
      group.gram()[j * 16 + record % 16] = real ? dot[e] * group.factors()[j] * group.factors()[record] : 0.0f;
    }
  }
}

// The token's vectors of all groups of the part as Part::vectorHalves has them, and records' products with them. By all
// warps.
template <class Traits>
__device__ __forceinline__ void makeVectorHalves(const Part<Traits>& part) {
#pragma unroll 1
  for (int task = part.warp; task < 3 * part.groups; task += Traits::kWarps) {
    const Part<Traits> group = part.inGroup(task / 3);
    const int vector = task % 3;
    if (vector == 2) {
      group.multiplyTile(group.vectorDots(), 0, part.pending);
    } else {
      storeVector<Traits>(group.vectorHalves() + vector * 2 * Traits::kStateDim, group.vectorFactors() + vector,
                          group.vectorRow(vector), part.lane);
    }
  }
}

// The committed keys of all groups of the part as Part::keyHalf has them, those that are not there zero. By all warps.
template <class Traits>
__device__ __forceinline__ void makeKeyHalves(const Part<Traits>& part) {
#pragma unroll 1
  for (int task = part.warp; task < 16 * part.groups; task += Traits::kWarps) {
    const int record = task % 16;
    const Part<Traits> group = part.inGroup(task / 16);
    uint2 words = make_uint2(0, 0);
    if (record < part.pending) {
      words = *reinterpret_cast<const uint2*>(group.keys() + record * Traits::kKeyPitch + part.lane * 8);
    }
    const float down = makeHalves<typename Traits::Act>(words);
    *reinterpret_cast<uint2*>(part.keyHalf(task / 16, numberOf(record)) + part.lane * 8) = words;
    if (part.lane == 0) {
      part.halfFactors(task / 16)[numberOf(record)] = record < part.pending ? down * group.factors()[record] : 0.0f;
    }
  }
}

// What the step's tokens do to each other and to their outputs, from `sum`: what checkpoint and committed records
// recall. Corrections are rounded to float16 before anything uses them, and appended.
template <class Traits, int kSlabs>
__device__ __forceinline__ void solveTokens(float (&sum)[kSlabs][4], const Part<Traits>& part, const Decay& decay,
                                            int index, int firstSlab, const char* values, int pitch, int lane) {
  using A = Activation<typename Traits::Act>;
  const UpdateParams& p = part.p;
  const int vector = lane / 4, token = vector / 2, i0 = 2 * (lane % 4);
  const float4 dot = part.tokenDots()[lane];
  float log[2];
  decay.between(log, i0, token, part.tokens);
  float coupling[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const bool past = i0 + e < token || (vector % 2 == 1 && i0 + e == token);
    const float key = part.norms()[min(2 * (i0 + e), 6)];
    coupling[e] = past && token < part.tokens ? key * part.norms()[vector] * expf(log[e]) * (e == 0 ? dot.x : dot.y)
                                              : 0.0f;
  }
  const int head = part.firstHead + index;
  __half* ring = static_cast<__half*>(p.ringValue) + part.slot * p.ringValueSlotStride +
                 static_cast<int64_t>(head) * p.ringRows * Traits::kHeadDim + firstSlab * 16 + lane / 4;
  const float* beta = part.beta(index) + part.pending;
#pragma unroll
  for (int t = 0; t < Traits::kMaxTokens; ++t) {
    if (t >= part.tokens) break;
    const char* value = values + (part.pending + t) * pitch + lane / 4 * 2;
    __half* to = ring + static_cast<int64_t>(part.ringRow(part.pending + t)) * Traits::kHeadDim;
    float weight[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      weight[e] = __shfl_sync(kAllLanes, coupling[t % 2], (2 * (lane % 4) + e) * 4 + t / 2);
    }
#pragma unroll
    for (int m = 0; m < kSlabs; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float v = A::toFloat(*reinterpret_cast<const uint16_t*>(value + 32 * m + 16 * half));
        const float exact = beta[t] * (v - sum[m][2 * half]);
        const __half rounded = roundedCorrection(__shfl_sync(kAllLanes, exact, (lane & ~3) | t));
        if (lane % 4 == t) to[16 * m + 8 * half] = rounded;
        const float u = lane % 4 < t ? 0.0f : __half2float(rounded);  // NaN would get past the weights of earlier tokens
#pragma unroll
        for (int e = 0; e < 2; ++e) sum[m][2 * half + e] = fmaf(weight[e], u, sum[m][2 * half + e]);
      }
    }
  }
}

// A step that does not flush: sum, the product of codes and vectors, becomes the outputs. scale: of the codes.
template <class Traits, int kSlabs>
__device__ __forceinline__ void streamGdn(float (&sum)[kSlabs][4], const Part<Traits>& part, int index, int firstSlab,
                                          const char* values, float scale, float queryFactor) {
  const int lane = part.lane, pending = part.pending, tokens = part.tokens;
  const float norm = part.norms()[lane / 4];
  Decay decay;
  decay.loadGdn(part.dt(index), part.factors(), pending, tokens, lane);
  const float prefix = __shfl_sync(kAllLanes, decay.prefix, lane % 4);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int source = (2 * (lane % 4) + e) * 4;
    const float factor = scale * __shfl_sync(kAllLanes, queryFactor, source) * __shfl_sync(kAllLanes, norm, source) *
                         expf(decay.total + prefix);
#pragma unroll
    for (int m = 0; m < kSlabs; ++m) {
      sum[m][e] *= factor;
      sum[m][2 + e] *= factor;
    }
  }
  const float reach = __shfl_sync(kAllLanes, decay.prefix, lane / 8);
  const float alpha = lane / 8 < tokens ? expf(reach) * norm : 0.0f;
#pragma unroll 1
  for (int first = 0; first < pending; first += 16) {
    const float4 dot = part.dots()[2 * first + lane];
    const float dots[4] = {dot.x, dot.y, dot.z, dot.w};
    float weight[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int record = first + 2 * (lane % 4) + e % 2 + e / 2 * 8;
      const float committed = decay.committed(first, record);
      weight[e] = record < pending ? committed * alpha * dots[e] : 0.0f;
    }
    addRecords<__half, kSlabs, Traits::kValuePitch>(sum, sharedAddress(values) + first * Traits::kValuePitch, weight,
                                                    pending - first, lane);
  }
  solveTokens<Traits, kSlabs>(sum, part, decay, index, firstSlab, values, Traits::kValuePitch, lane);
}

// Deriving the corrections of up to 16 committed records from `first` on anew, and folding them, takes three steps
// (plain decoding: solve_gdn.cuh).
//
// 1. Lane (g, c): what the slab recalls for records 8 tile + 2c + e, rows g and g + 8.
template <class Traits>
__device__ __forceinline__ void recallRecords(float (&recall)[2][4], const Slab& s, const Part<Traits>& part,
                                              int first) {
  const int lane = part.lane, count = min(part.pending - first, 16);
  const char* own = part.keys() + (first + lane / 4) * Traits::kKeyPitch;
  readSlab<Traits, 2>(recall, s, {own, own + 8 * Traits::kKeyPitch}, {lane / 4 < count, lane / 4 + 8 < count}, lane);
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = 8 * tile + 2 * (lane % 4) + e % 2;
      recall[tile][e] *= column < count ? part.factors()[first + column] : 0.0f;
    }
  }
}

// S k for up to 16 records by number (solve_gdn.cuh), less the keys' factors, from the slab or from its codes, which
// are exact in float16 and lack the rows' scales; keys: key halves number g and g + 8.
template <class Traits>
__device__ __forceinline__ void recallSlab(float (&recall)[2][4], const Slab& s, const Part<Traits>& part) {
  const int record = recordOf(part.lane / 4);
  const char* own = part.keys() + record * Traits::kKeyPitch;
  readSlab<Traits, 2>(recall, s, {own, own + 8 * Traits::kKeyPitch}, {record < part.pending, record + 8 < part.pending},
                      part.lane);
}
// product: of the codes and the token's key (even c) or query.
template <class Traits, class Codec>
__device__ __forceinline__ void recallCodes(float (&recall)[2][4], float (&product)[2], const char* slab,
                                            const char* vectors, const char* const (&keys)[2], int lane) {
#pragma unroll
  for (int e = 0; e < 4; ++e) recall[0][e] = recall[1][e] = 0.0f;
  CodeProduct<Traits> token(vectors, lane);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const uint4 x[2] = {Codec::halves(slab, b, 0, lane), Codec::halves(slab, b, 1, lane)};
    token.add(x, b);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const uint4 key = *reinterpret_cast<const uint4*>(keys[tile] + Traits::pieceColumn(b, lane % 4) * 2);
      mmaAct<__half>(recall[tile], {x[0].x, x[1].x, x[0].y, x[1].y}, key.x, key.y);
      mmaAct<__half>(recall[tile], {x[0].z, x[1].z, x[0].w, x[1].w}, key.z, key.w);
    }
  }
  product[0] = token.row(0);
  product[1] = token.row(1);
}

// 2. The corrections of records c, c + 4, c + 8, c + 12, rows g and g + 8. `recall` is brought to each record in turn.
template <class Traits>
__device__ __forceinline__ void solveRecords(float (&u)[4][2], float (&recall)[2][4], const Part<Traits>& part,
                                             int index, int first, const char* values) {
  using A = Activation<typename Traits::Act>;
  const int lane = part.lane, count = min(part.pending - first, 16);
  const float* log = part.dt(index) + first;
  const float* beta = part.beta(index) + first;
  const float* gram = part.gram() + first * 16 + 2 * (lane % 4);
  const char* value = values + first * Traits::kSlabValuePitch + lane / 4 * 2;
#pragma unroll
  for (int j = 0; j < 4; ++j) u[j][0] = u[j][1] = 0.0f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (j >= count) break;
    const float alpha = expf(log[j]);
    const float2 low = *reinterpret_cast<const float2*>(gram + 16 * j);
    const float2 high = *reinterpret_cast<const float2*>(gram + 16 * j + 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        recall[0][2 * half + e] *= alpha;
        recall[1][2 * half + e] *= alpha;
      }
      const float own = __shfl_sync(kAllLanes, recall[j / 8][2 * half + j % 2], (lane & ~3) | j % 8 / 2);
      const float v = A::toFloat(*reinterpret_cast<const uint16_t*>(value + j * Traits::kSlabValuePitch + 16 * half));
      const float correction = beta[j] * (v - own);
      if (lane % 4 == j % 4) u[j / 4][half] = correction;
      recall[0][2 * half] = fmaf(correction, low.x, recall[0][2 * half]);
      recall[0][2 * half + 1] = fmaf(correction, low.y, recall[0][2 * half + 1]);
      recall[1][2 * half] = fmaf(correction, high.x, recall[1][2 * half]);
      recall[1][2 * half + 1] = fmaf(correction, high.y, recall[1][2 * half + 1]);
    }
  }
}

// 3. The fold itself.
template <class Traits>
__device__ __forceinline__ void foldRecords(Slab& s, const float (&u)[4][2], const Part<Traits>& part, int index,
                                            int first) {
  const int lane = part.lane, count = min(part.pending - first, 16);
  Decay decay;
  decay.loadGdn(part.dt(index) + first, part.factors() + first, count, 0, lane);
  float weighted[4][2];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float factor = decay.committed(0, lane % 4 + 4 * e);
    weighted[e][0] = factor * u[e][0];
    weighted[e][1] = factor * u[e][1];
  }
  foldFragments<Traits>(s, part.keys() + first * Traits::kKeyPitch, weighted, expf(decay.total), 0, count, lane);
}

// sum[2 half + v]: what this lane's columns of the folded slab give for vector v of the token, rows g and g + 8.
template <class Traits>
__device__ __forceinline__ void readToken(float (&sum)[4], const Slab& s, const Part<Traits>& part) {
  using A = Activation<typename Traits::Act>;
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] = 0.0f;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    uint32_t words[2][4];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const uint4 piece =
          *reinterpret_cast<const uint4*>(part.vectorRow(v) + Traits::pieceColumn(b, part.lane % 4) * 2);
      words[v][0] = piece.x;
      words[v][1] = piece.y;
      words[v][2] = piece.z;
      words[v][3] = piece.w;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&x)[8] = s[b][half];
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        float& own = sum[2 * half + v];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          own = fmaf(x[2 * i + 1], A::high(words[v][i]), fmaf(x[2 * i], A::low(words[v][i]), own));
        }
      }
    }
  }
}

// The same from the product of codes and vectors, which lanes with c < 2 have whole, and this lane's records.
template <class Traits>
__device__ __forceinline__ void readTokenCodes(float (&sum)[4], const float (&weighted)[4][2], const float (&product)[2],
                                               const float2& scale, float decay, const Part<Traits>& part) {
  const int c = part.lane % 4;
  const float* dots = reinterpret_cast<const float*>(part.vectorDots() + c / 2) + c % 2;
  const float factor = decay * part.vectorFactors()[c % 2];
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    float own[2];
    addWeighted(own, weighted, dots + 16 * v);
    sum[v] = c == v ? fmaf(factor * scale.x, product[0], own[0]) : own[0];  // the other vector's NaN is not this one's
    sum[2 + v] = c == v ? fmaf(factor * scale.y, product[1], own[1]) : own[1];
  }
}

// The token's own, from what the folded slab gives for it, in shares: output, appended correction and value.
template <class Traits>
__device__ __forceinline__ void finishToken(const float (&shares)[4], const Part<Traits>& part, int index, int slab,
                                            const char* values) {
  using A = Activation<typename Traits::Act>;
  const int lane = part.lane;
  const float sum[2][4] = {{shares[0], shares[1], shares[2], shares[3]}, {}};
  float recalled[2];
  dealRows(recalled, sum, lane);
  const float alpha = expf(part.dt(index)[part.pending]);
#pragma unroll
  for (int v = 0; v < 2; ++v) recalled[v] *= alpha * part.norms()[v];
  if (lane % 4 >= 2) return;
  const int row = lane / 4 + 8 * (lane % 2);
  const uint16_t value = *reinterpret_cast<const uint16_t*>(values + part.pending * Traits::kSlabValuePitch + row * 2);
  const TokenPlace<Traits> token(part, part.firstHead + index, slab * 16 + row);
  *token.out = A::fromFloat(finishRow<Traits>(recalled, value, part.beta(index)[part.pending], part.norms()[2],
                                              token.correction, token.raw));
}

// A flush: folds the committed records into the slab and computes the outputs.
template <class Traits>
__device__ __forceinline__ void flushGdn(float (&sum)[4], Slab& s, const Part<Traits>& part, int index, int slab,
                                         const char* values, int lane) {
#pragma unroll 1
  for (int first = 0; first < part.pending; first += 16) {
    float recall[2][4], u[4][2];
    recallRecords(recall, s, part, first);
    solveRecords(u, recall, part, index, first, values);
    foldRecords(s, u, part, index, first);
  }
  float recalled[1][4];
  readSlab<Traits, 1>(recalled, s, {part.vectorRow(lane / 4)}, {lane / 4 < part.vectors()}, lane);
  Decay decay;
  decay.loadGdn(part.dt(index) + part.pending, part.factors(), 0, part.tokens, lane);
  const float alpha = expf(__shfl_sync(kAllLanes, decay.prefix, lane % 4));
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float factor = alpha * part.norms()[2 * (lane % 4) + e];
    recalled[0][e] *= factor;
    recalled[0][2 + e] *= factor;
  }
  solveTokens<Traits, 1>(recalled, part, decay, index, slab, values, Traits::kSlabValuePitch, lane);
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] = recalled[0][e];
}

}  // namespace replayssm
