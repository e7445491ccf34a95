// Matrix fragments of the prompt scan: loads and stores of 8x8 tiles, exact splits into bfloat16 parts, sums of
// products of parts.
//
// Every matrix instruction is m16n8k16 with bfloat16 operands (fragment ownership: common/mma.cuh). A float32 operand
// is split into parts of eight bits; three parts hold all 24, two hold 17. A float16 activation is two parts. Rows of
// the accumulators are value elements (p), so a warp keeps 16 state rows and all that follows from them in registers:
// an accumulator over two neighbouring tiles is, split, the A operand of the next product.
#pragma once

#include "../common/activation.cuh"
#include "../common/mbarrier.cuh"
#include "../common/mma.cuh"

namespace replayssm {

__device__ __forceinline__ void loadTiles(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void loadTilesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void storeTilesTransposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Byte offset of this lane's row in a 16x16 block of a row-major tile of 16-bit elements. The four 8x8 tiles come in
// the order (0, 0) (8, 0) (0, 8) (8, 8): an A operand whose M is the rows (loadTiles), or two B operands whose depth is
// the rows, of columns 0..7 and 8..15 (loadTilesTransposed).
__device__ __forceinline__ int rowsFirst(int pitch, int lane) { return (lane & 15) * pitch + (lane >> 4) * 16; }

// The same in the order (0, 0) (0, 8) (8, 0) (8, 8): two B operands whose depth is the columns, of rows 0..7 and 8..15
// (loadTiles), or an A operand whose M is the columns (loadTilesTransposed), or such a block to store.
__device__ __forceinline__ int columnsFirst(int pitch, int lane) {
  return ((lane & 7) + (lane >> 4) * 8) * pitch + (lane >> 3 & 1) * 16;
}

__device__ __forceinline__ float leadingBits(float x) { return __uint_as_float(__float_as_uint(x) & 0xffff0000u); }

// The upper halves of two words, the first in the low half.
__device__ __forceinline__ uint32_t packLeading(float first, float second) {
  return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
}

// The parts of two neighbouring elements; the last of two parts is rounded, the last of three is exact.
template <int kParts>
__device__ __forceinline__ void splitPair(uint32_t (&part)[kParts], float first, float second) {
#pragma unroll
  for (int i = 0; i + 1 < kParts; ++i) {
    part[i] = packLeading(first, second);
    first -= leadingBits(first);
    second -= leadingBits(second);
  }
  if constexpr (kParts == 3) {
    part[2] = packLeading(first, second);
  } else {
    __nv_bfloat162 rounded = __floats2bfloat162_rn(first, second);
    part[kParts - 1] = *reinterpret_cast<const uint32_t*>(&rounded);
  }
}

// A operand from the accumulators of two neighbouring tiles.
template <int kParts>
__device__ __forceinline__ void splitOperand(uint32_t (&part)[kParts][4], const float (&left)[4],
                                             const float (&right)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float* from = e < 2 ? left : right;
    uint32_t one[kParts];
    splitPair<kParts>(one, from[2 * (e & 1)], from[2 * (e & 1) + 1]);
#pragma unroll
    for (int i = 0; i < kParts; ++i) part[i][e] = one[i];
  }
}

// How many bfloat16 parts hold an activation exactly, and those parts of a packed pair.
template <class Act>
struct Parts;

template <>
struct Parts<__nv_bfloat16> {
  static constexpr int kCount = 1;
  static __device__ __forceinline__ void of(uint32_t (&part)[1], uint32_t pair) { part[0] = pair; }
};

template <>
struct Parts<__half> {
  static constexpr int kCount = 2;
  static __device__ __forceinline__ void of(uint32_t (&part)[2], uint32_t pair) {
    splitPair<2>(part, Activation<__half>::low(pair), Activation<__half>::high(pair));
  }
};

// Four packed pairs of activations as parts: an A operand, or two B operands {0, 1} and {2, 3}.
template <class Act>
__device__ __forceinline__ void splitActivations(uint32_t (&part)[Parts<Act>::kCount][4], const uint32_t (&raw)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    uint32_t one[Parts<Act>::kCount];
    Parts<Act>::of(one, raw[e]);
#pragma unroll
    for (int i = 0; i < Parts<Act>::kCount; ++i) part[i][e] = one[i];
  }
}

// Accumulators of all tokens of a chunk as activations into a tile of rows of tokens; `to`: this lane's row,
// columnsFirst.
template <class Act, int kTiles>
__device__ __forceinline__ void storePacked(const float (&rows)[kTiles][4], uint32_t to, int pitch) {
#pragma unroll
  for (int b = 0; b < kTiles / 2; ++b) {
    uint32_t packed[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* o = &rows[2 * b + e / 2][e % 2 * 2];
      packed[e] = Activation<Act>::fromFloat(o[0]) | static_cast<uint32_t>(Activation<Act>::fromFloat(o[1])) << 16;
    }
    storeTilesTransposed(to + b * 16 * pitch, packed);
  }
}

// d[tile] += sum of a[i] b[tile / 2][j] over parts with i + j < kTerms, least first. b[pair][j] holds two B operands.
template <int kTerms, int kA, int kB, int kPairs>
__device__ __forceinline__ void addProducts(float (*d)[4], const uint32_t (&a)[kA][4],
                                            const uint32_t (&b)[kPairs][kB][4]) {
#pragma unroll
  for (int order = kTerms - 1; order >= 0; --order) {
#pragma unroll
    for (int j = 0; j < kB; ++j) {
      const int i = order - j;
      if (i < 0 || i >= kA) continue;
#pragma unroll
      for (int tile = 0; tile < 2 * kPairs; ++tile) {
        const uint32_t* operand = b[tile / 2][j] + 2 * (tile % 2);
        mmaAct<__nv_bfloat16>(d[tile], a[i], operand[0], operand[1]);
      }
    }
  }
}

}  // namespace replayssm
