// How state formats sit in memory and how a matrix instruction takes them (rows of 128 columns).
//
// For a product with queries, a state is the left operand of mma.m16n8k16 in float16: every format's codes are exact in
// it, up to a factor that is multiplied in afterwards. A lane takes 16-byte pieces of its two rows; which column a
// matrix index stands for is free as long as the queries follow, and column() says it.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../replay_update/dispatch.h"

namespace replayssm {

// Bytes of one state row and of its scales.
template <StateFormat kFormat, int kStateDim>
struct FormatSize {
  static constexpr int kRowBytes = kFormat == StateFormat::kFloat32   ? kStateDim * 4
                                   : kFormat == StateFormat::kFloat16 ? kStateDim * 2
                                   : kFormat == StateFormat::kE4m3    ? kStateDim
                                                                      : kStateDim / 2;
  static constexpr int kScaleBytes = kFormat == StateFormat::kE4m3 ? 4 * (kStateDim / 128)
                                     : kFormat == StateFormat::kE2m1 ? kStateDim / 16
                                                                     : 0;
};

// Left operands of the eight products over 128 columns: step s of rows g and g + 8.
using StateFragments = uint32_t[8][4];

__device__ __forceinline__ uint32_t multiplyHalves(uint32_t a, uint32_t b) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Two E4M3 codes, the lower byte first, as two float16 numbers. Exact.
__device__ __forceinline__ uint32_t halvesOfE4m3(uint32_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
  return halves;
}

template <StateFormat kFormat>
struct StateReader;

template <>
struct StateReader<StateFormat::kFloat16> {
  static constexpr float kFactor = 1.0f;  // the fragments' numbers times this are the state's, less block scales

  // Column of lane c's element e (0..3) in step s.
  static __device__ __forceinline__ int column(int s, int c, int e) { return s / 2 * 32 + 8 * c + s % 2 * 4 + e; }

  // `rows`: the first of 16 rows.
  static __device__ __forceinline__ void load(StateFragments& a, const char* rows, const char*, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* row = rows + (lane / 4 + 8 * half) * 256 + lane % 4 * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 word = *reinterpret_cast<const uint4*>(row + 64 * i);
        a[2 * i][half] = word.x;
        a[2 * i][2 + half] = word.y;
        a[2 * i + 1][half] = word.z;
        a[2 * i + 1][2 + half] = word.w;
      }
    }
  }

  static __device__ __forceinline__ void scale(float (&)[4], const char*, int) {}
};

template <>
struct StateReader<StateFormat::kE4m3> {
  static constexpr float kFactor = 1.0f;

  static __device__ __forceinline__ int column(int s, int c, int e) { return s / 4 * 64 + 16 * c + s % 4 * 4 + e; }

  static __device__ __forceinline__ void load(StateFragments& a, const char* rows, const char*, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* row = rows + (lane / 4 + 8 * half) * 128 + lane % 4 * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 piece = *reinterpret_cast<const uint4*>(row + 64 * i);
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          a[4 * i + w][half] = halvesOfE4m3(words[w]);
          a[4 * i + w][2 + half] = halvesOfE4m3(words[w] >> 16);
        }
      }
    }
  }

  // One float32 a row.
  static __device__ __forceinline__ void scale(float (&sum)[4], const char* scales, int lane) {
    const float* row = reinterpret_cast<const float*>(scales) + lane / 4;
    const float low = row[0], high = row[8];
    sum[0] *= low;
    sum[1] *= low;
    sum[2] *= high;
    sum[3] *= high;
  }
};

template <>
struct StateReader<StateFormat::kE2m1> {
  static constexpr float kFactor = 16384.0f;

  static __device__ __forceinline__ int column(int s, int c, int e) {
    return 32 * c + s / 2 * 8 + s % 2 * 2 + e / 2 + 4 * (e % 2);
  }

  // A row's fragments of the codes alone (half: 0, or 1 for row g + 8). Sign and three bits of a code, moved to the sign,
  // the last exponent bits and the first mantissa bit of a float16, are its value times 2^-14, 0.5 (a subnormal)
  // included. Four codes at a time become the upper bytes of float16 numbers, whose lower ones are zero.
  static __device__ __forceinline__ void unpack(StateFragments& a, int half, const uint4& piece) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint32_t x = words[w];
      const uint32_t even = (x << 4 & 0x80808080u) | (x << 1 & 0x0e0e0e0eu);
      const uint32_t odd = (x & 0x80808080u) | (x >> 3 & 0x0e0e0e0eu);
      a[2 * w][half] = __byte_perm(even, 0, 0x2404);      // codes 0 and 4
      a[2 * w][2 + half] = __byte_perm(odd, 0, 0x2404);   // 1 and 5
      a[2 * w + 1][half] = even & 0xff00ff00u;            // 2 and 6
      a[2 * w + 1][2 + half] = odd & 0xff00ff00u;         // 3 and 7
    }
  }
  static __device__ __forceinline__ void loadCodes(StateFragments& a, const char* rows, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unpack(a, half, *reinterpret_cast<const uint4*>(rows + (lane / 4 + 8 * half) * 64 + lane % 4 * 16));
    }
  }

  // The scales of blocks 2c and 2c + 1 of a row, as two float16 numbers.
  static __device__ __forceinline__ uint32_t blockScales(const char* scales, int row, int lane) {
    return halvesOfE4m3(*reinterpret_cast<const uint16_t*>(scales + row * 8 + lane % 4 * 2));
  }

  // With block scales multiplied in, which is exact: six bits, above 2^-24.
  static __device__ __forceinline__ void load(StateFragments& a, const char* rows, const char* scales, int lane) {
    loadCodes(a, rows, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t both = blockScales(scales, lane / 4 + 8 * half, lane);
      const uint32_t scale[2] = {__byte_perm(both, 0, 0x1010), __byte_perm(both, 0, 0x3232)};
#pragma unroll
      for (int s = 0; s < 8; ++s) {
        a[s][half] = multiplyHalves(a[s][half], scale[s / 4]);
        a[s][2 + half] = multiplyHalves(a[s][2 + half], scale[s / 4]);
      }
    }
  }

  static __device__ __forceinline__ void scale(float (&)[4], const char*, int) {}
};

}  // namespace replayssm
