// Random device data for the benchmark.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

cudaError_t fillFloat32(void* data, int64_t count, float low, float high, uint32_t seed);
cudaError_t fillFloat16(void* data, int64_t count, float low, float high, uint32_t seed);
cudaError_t fillBfloat16(void* data, int64_t count, float low, float high, uint32_t seed);
