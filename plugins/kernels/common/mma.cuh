// Warp-level matrix instructions and the exact split of float32 operands they need.
//
// Fragment ownership, with g = lane / 4 and c = lane % 4 (PTX, mma.m16n8k8 and m16n8k16):
//   accumulator d[0..3]: (row g, columns 2c, 2c+1), (row g+8, columns 2c, 2c+1)
//   k8  A: (g, c) (g+8, c) (g, c+4) (g+8, c+4)            B: (c, g) (c+4, g)
//   k16 A: pairs (g, 2c) (g+8, 2c) (g, 2c+8) (g+8, 2c+8)  B: pairs (2c, g) (2c+8, g)
// Which matrix index each k stands for is free as long as A and B agree; the kernels use that to load 16 bytes a lane.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace replayssm {

// d += a b with tf32 operands (low 13 bits of each word are ignored) and float32 accumulation.
__device__ __forceinline__ void mmaTf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b with packed pairs of Act; products of two activations are exact in float32.
template <class Act>
__device__ __forceinline__ void mmaAct(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mmaAct<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                      uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mmaAct<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// value = high + low up to 2^-22 of value: high keeps the eleven leading bits, low the rest, rounded to tf32.
struct Split {
  uint32_t high, low;
};

__device__ __forceinline__ Split splitTf32(float value) {
  Split s;
  s.high = __float_as_uint(value) & 0xffffe000u;
  s.low = __float_as_uint(value - __uint_as_float(s.high));
  return s;
}

// The same up to 2^-21 of value, with ten bits in high: the compiler keeps this mask, as it decides a product, and makes
// the operand with it; the mask of splitTf32 it drops, and copies the operand's words.
__device__ __forceinline__ Split splitTf32Short(float value) {
  Split s;
  s.high = __float_as_uint(value) & 0xffffc000u;
  s.low = __float_as_uint(value - __uint_as_float(s.high));
  return s;
}

// The same with the low part rounded to nearest, for operands that enter a checkpoint.
__device__ __forceinline__ Split splitTf32Rounded(float value) {
  Split s = splitTf32(value);
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(s.low) : "f"(__uint_as_float(s.low)));
  return s;
}

}  // namespace replayssm
