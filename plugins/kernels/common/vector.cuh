// Short vectors of 16-bit activations: one memory access each, unpacked to float32 registers.
#pragma once

#include "activation.cuh"

namespace replayssm {

template <int kCount>
struct PackedType;
template <>
struct PackedType<1> {
  using type = uint16_t;
};
template <>
struct PackedType<2> {
  using type = uint32_t;
};
template <>
struct PackedType<4> {
  using type = uint2;
};
template <>
struct PackedType<8> {
  using type = uint4;
};

// kCount activations as they lie in memory.
template <int kCount>
using Packed = typename PackedType<kCount>::type;

// The word at `at`, or zero where it must not be read. One predicated load: a branch would make the loads of several
// rows wait for each other. HAZARD: the clobber keeps it before later stores to what it reads.
__device__ __forceinline__ uint2 loadIf(bool wanted, const uint2* at) {
  uint2 word;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
               "@p ld.global.v2.b32 {%0, %1}, [%2];\n}"
               : "=&r"(word.x), "=&r"(word.y)
               : "l"(at), "r"(static_cast<int>(wanted))
               : "memory");
  return word;
}
__device__ __forceinline__ uint4 loadIf(bool wanted, const uint4* at) {
  uint4 word;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
               "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
               "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
               : "=&r"(word.x), "=&r"(word.y), "=&r"(word.z), "=&r"(word.w)
               : "l"(at), "r"(static_cast<int>(wanted))
               : "memory");
  return word;
}
__device__ __forceinline__ uint16_t loadIf(bool wanted, const uint16_t* at) {
  uint16_t word;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.b16 %0, [%1];\n}"
               : "=&h"(word)
               : "l"(at), "r"(static_cast<int>(wanted))
               : "memory");
  return word;
}

__device__ __forceinline__ float loadIf(bool wanted, const float* at) {
  float value;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.b32 %0, [%1];\n}"
               : "=&f"(value)
               : "l"(at), "r"(static_cast<int>(wanted))
               : "memory");
  return value;
}

// One store of a whole word, which the compiler may cut otherwise.
__device__ __forceinline__ void storeWord(uint16_t* at, uint16_t word) { *at = word; }
__device__ __forceinline__ void storeWord(uint4* at, const uint4& word) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

template <class Act>
__device__ __forceinline__ void unpack(uint16_t packed, float (&values)[1]) {
  values[0] = Activation<Act>::toFloat(packed);
}
template <class Act>
__device__ __forceinline__ void unpack(uint32_t packed, float (&values)[2]) {
  values[0] = Activation<Act>::low(packed);
  values[1] = Activation<Act>::high(packed);
}
template <class Act>
__device__ __forceinline__ void unpack(uint2 packed, float (&values)[4]) {
  values[0] = Activation<Act>::low(packed.x);
  values[1] = Activation<Act>::high(packed.x);
  values[2] = Activation<Act>::low(packed.y);
  values[3] = Activation<Act>::high(packed.y);
}
template <class Act>
__device__ __forceinline__ void unpack(uint4 packed, float (&values)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = Activation<Act>::low(words[i]);
    values[2 * i + 1] = Activation<Act>::high(words[i]);
  }
}

template <class Act>
__device__ __forceinline__ uint32_t packPair(float low, float high) {
  return static_cast<uint32_t>(Activation<Act>::fromFloat(high)) << 16 | Activation<Act>::fromFloat(low);
}
template <class Act>
__device__ __forceinline__ uint16_t pack(const float (&values)[1]) {
  return Activation<Act>::fromFloat(values[0]);
}
template <class Act>
__device__ __forceinline__ uint32_t pack(const float (&values)[2]) {
  return packPair<Act>(values[0], values[1]);
}
template <class Act>
__device__ __forceinline__ uint2 pack(const float (&values)[4]) {
  return {packPair<Act>(values[0], values[1]), packPair<Act>(values[2], values[3])};
}
template <class Act>
__device__ __forceinline__ uint4 pack(const float (&values)[8]) {
  return {packPair<Act>(values[0], values[1]), packPair<Act>(values[2], values[3]),
          packPair<Act>(values[4], values[5]), packPair<Act>(values[6], values[7])};
}

// x * sigmoid(x) to a few float32 steps; callers round the result to 16 bits.
__device__ __forceinline__ float siluFast(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// max(x, 0)^2. NaN stays NaN, which fmaxf would drop.
__device__ __forceinline__ float squaredRelu(float x) {
  float positive;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));
  return positive * positive;
}

}  // namespace replayssm
