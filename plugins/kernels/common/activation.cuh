// Activation element types: conversions between packed 16-bit storage and float32. Both types are exact in tf32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace replayssm {

template <class Act>
struct Activation;

template <>
struct Activation<__nv_bfloat16> {
  __device__ static __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  __device__ static __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
  __device__ static __forceinline__ float toFloat(uint16_t bits) { return low(bits); }
  __device__ static __forceinline__ uint16_t fromFloat(float value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
};

template <>
struct Activation<__half> {
  __device__ static __forceinline__ float low(uint32_t pair) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(pair)));
  }
  __device__ static __forceinline__ float high(uint32_t pair) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(pair >> 16)));
  }
  __device__ static __forceinline__ float toFloat(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
  __device__ static __forceinline__ uint16_t fromFloat(float value) { return __half_as_ushort(__float2half_rn(value)); }
};

}  // namespace replayssm
