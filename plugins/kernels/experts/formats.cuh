// Weight formats: how a lane's packed bytes become operands of mma.m16n8k16, the weight on the 16-row side.
//
// A tile block is 16 rows by kStepColumns columns. Lane (g = lane / 4, c = lane % 4) owns of each 64 columns the 16
// from 16 c on, of the tile's fragment rows g and g + 8. A sub-step is 32 columns of the step: two instructions.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace replayssm {

constexpr int kPieceBytes = 512;  // of a tile, 16 a lane

__device__ __forceinline__ uint4 sharedPiece(uint32_t address) {
  uint4 word;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "r"(address));
  return word;
}
__device__ __forceinline__ uint32_t sharedWord(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

// The lane and the warp, read anew: what follows from it is not kept in registers while the sums need them.
__device__ __forceinline__ int laneAnew() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ int warpAnew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread / 32;
}

__device__ __forceinline__ uint32_t rotateRight(uint32_t word, int bits) { return __funnelshift_r(word, word, bits); }

template <int kBits>
__device__ __forceinline__ uint32_t shiftedLeft(uint32_t word) {
  return word * (1u << kBits);
}

// `a` where the mask has ones, `b` elsewhere, by one instruction.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t selectBits(uint32_t a, uint32_t b) {
  uint32_t word;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(word) : "r"(a), "r"(b), "n"(kMask));
  return word;
}

__device__ __forceinline__ uint32_t multiplyPair(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("{\n.reg .b32 zero;\nmov.b32 zero, 0x80008000;\nfma.rn.bf16x2 %0, %1, %2, zero;\n}" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// E2M1 codes with an E4M3 scale per 16 columns. A code's bits are spread so that one rotation and one mask make a pair of
// bfloat16: sign at 15, magnitude at 8..6, which is the value times 2^-126 (0.5 becomes a subnormal number). The scale
// enters as its value times 2^119; code and scale have six significant bits together, so the product is exact and
// 2^-7 of the weight, which the row factor makes up for.
struct Nvfp4Weights {
  static constexpr int kStepColumns = 128, kPieces = 2, kScaleBytes = 4;
  static constexpr float kFactor = 128.0f;

  uint4 piece;      // of 64 columns
  uint32_t scales;  // (row g, first 64) (row g, second 64) (row g + 8, first) (row g + 8, second)

  __device__ __forceinline__ void loadFirst(uint32_t pieces, uint32_t scaleWord) {
    piece = sharedPiece(pieces);
    scales = sharedWord(scaleWord);
  }
  __device__ __forceinline__ void loadSecond(uint32_t pieces) { piece = sharedPiece(pieces + kPieceBytes); }

  // The pair at `turn` to the right, or, below 0, to the left: within its halves, by a product, as the units of logic
  // have the most to do.
  template <int kTurn>
  __device__ __forceinline__ static uint32_t pairOf(uint32_t word) {
    if constexpr (kTurn < 0) {
      return shiftedLeft<-kTurn>(word) & 0x81c081c0u;
    } else {
      return rotateRight(word, kTurn) & 0x81c081c0u;
    }
  }

  // Both rows' scales of 64 columns, low half: row g.
  __device__ __forceinline__ static uint32_t scalePair(uint32_t scales, int half) {
    const uint32_t raw = (half == 0 ? scales << 4 : scales >> 4) & 0x07f007f0u;  // times 2^-120
    return multiplyPair(multiplyPair(raw, 0x7b807b80u), 0x7b007b00u);           // times 2^120, 2^119
  }

  template <int kSub>
  __device__ __forceinline__ void operands(uint32_t (&a)[2][4]) const {
    constexpr int kHalf = kSub / 2;
    const uint32_t w0 = kSub % 2 == 0 ? piece.x : piece.z, w1 = kSub % 2 == 0 ? piece.y : piece.w;
    const uint32_t rest = selectBits<0x60306030u>(w0, shiftedLeft<2>(w1));
    const uint32_t both = scalePair(scales, kHalf);
    const uint32_t upper = __byte_perm(both, both, 0x1010), lower = __byte_perm(both, both, 0x3232);
    a[0][0] = multiplyPair(pairOf<0>(w0), upper);
    a[0][1] = multiplyPair(pairOf<4>(w0), lower);
    a[0][2] = multiplyPair(pairOf<-6>(w0), upper);
    a[0][3] = multiplyPair(pairOf<0>(w1), lower);
    a[1][0] = multiplyPair(pairOf<6>(w1), upper);
    a[1][1] = multiplyPair(pairOf<-4>(w1), lower);
    a[1][2] = multiplyPair(pairOf<6>(rest), upper);
    a[1][3] = multiplyPair(pairOf<-4>(rest), lower);
  }
};

// E4M3 codes, one factor per matrix or row. A word holds four columns of a row: bytes 0 and 2 the second pair, 1 and 3
// the first.
struct Fp8Weights {
  static constexpr int kStepColumns = 64, kPieces = 2, kScaleBytes = 0;
  static constexpr float kFactor = 1.0f;

  uint4 piece;  // of 32 columns

  __device__ __forceinline__ void loadFirst(uint32_t pieces, uint32_t) { piece = sharedPiece(pieces); }
  __device__ __forceinline__ void loadSecond(uint32_t pieces) { piece = sharedPiece(pieces + kPieceBytes); }

  __device__ __forceinline__ static void pairsOf(uint32_t word, uint32_t& first, uint32_t& second) {
    const uint32_t up = word << 8;
    first = multiplyPair((word & 0x80008000u) | ((word >> 4) & 0x07f007f0u), 0x7b807b80u);  // times 2^120
    second = multiplyPair((up & 0x80008000u) | ((word << 4) & 0x07f007f0u), 0x7b807b80u);
  }

  template <int kSub>
  __device__ __forceinline__ void operands(uint32_t (&a)[2][4]) const {
    pairsOf(piece.x, a[0][0], a[0][2]);
    pairsOf(piece.y, a[0][1], a[0][3]);
    pairsOf(piece.z, a[1][0], a[1][2]);
    pairsOf(piece.w, a[1][1], a[1][3]);
  }
};

// Operands as they are.
struct Bfloat16Weights {
  static constexpr int kStepColumns = 64, kPieces = 4, kScaleBytes = 0;
  static constexpr float kFactor = 1.0f;

  uint4 piece[2];  // of 16 columns each

  __device__ __forceinline__ void loadFirst(uint32_t pieces, uint32_t) {
    piece[0] = sharedPiece(pieces);
    piece[1] = sharedPiece(pieces + kPieceBytes);
  }
  __device__ __forceinline__ void loadSecond(uint32_t pieces) { loadFirst(pieces + 2 * kPieceBytes, 0); }

  template <int kSub>
  __device__ __forceinline__ void operands(uint32_t (&a)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4& p = piece[i];
      a[i][0] = p.x;
      a[i][1] = p.y;
      a[i][2] = p.z;
      a[i][3] = p.w;
    }
  }
};

}  // namespace replayssm
