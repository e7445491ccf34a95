// Device-side random data for the benchmark: uniform numbers from a hash of the index, so that no buffer is constant.
#include "fill.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace {

__device__ float uniform(uint64_t index, uint32_t seed) {
  uint64_t z = index * 0x9e3779b97f4a7c15ull + seed * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-24f;
}

template <class T>
__global__ void fillKernel(T* data, int64_t count, float low, float high, uint32_t seed) {
  int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count; i += step) {
    data[i] = static_cast<T>(low + (high - low) * uniform(i, seed));
  }
}

}  // namespace

cudaError_t fillFloat32(void* data, int64_t count, float low, float high, uint32_t seed) {
  fillKernel<<<1024, 256>>>(static_cast<float*>(data), count, low, high, seed);
  return cudaGetLastError();
}

cudaError_t fillFloat16(void* data, int64_t count, float low, float high, uint32_t seed) {
  fillKernel<<<1024, 256>>>(static_cast<__half*>(data), count, low, high, seed);
  return cudaGetLastError();
}

cudaError_t fillBfloat16(void* data, int64_t count, float low, float high, uint32_t seed) {
  fillKernel<<<1024, 256>>>(static_cast<__nv_bfloat16*>(data), count, low, high, seed);
  return cudaGetLastError();
}
