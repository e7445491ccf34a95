// What lets arithmetic be compiled for the device by nvcc and for the host by any C++17 compiler, so that it is tested
// where there is no GPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define RSSM_PORTABLE __host__ __device__ __forceinline__
#else
#define RSSM_PORTABLE inline
#endif

namespace replayssm {

RSSM_PORTABLE uint32_t bitsOf(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

RSSM_PORTABLE float floatOf(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

}  // namespace replayssm
