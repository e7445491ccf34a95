// Whole states out of and into a pool, as the ABI layer sees them: plain data, checked there; strides in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

enum class StoredFormat : int32_t { kNone, kFloat32, kFloat16, kE4m3, kE2m1 };

// One copy of the states [S, H, P, N]; all but the slot axis contiguous.
struct StateCopy {
  StoredFormat format;
  void* data;
  int64_t slotStride;
  void* scale;  // e4m3: float32 [S, H, P, ceil(N / 128)]; e2m1: e4m3 [S, H, P, N / 16]
  int64_t scaleSlotStride;
  float* headScale;  // e2m1: [S, H]
  int64_t headScaleSlotStride;
};

// A ring tensor [S, heads or groups, C, ...], all but the slot axis contiguous.
struct RingTensor {
  const void* data;
  int64_t slotStride;
};

struct ExportParams {
  int32_t states, slots, heads, groups, headDim, stateDim, window, ringRows;  // E, S, H, G, P, N, L, C
  bool gdn, rederives, float16;  // float16: activations; else bfloat16
  const int32_t* slot;
  int64_t slotStride;
  const int32_t* origin;
  const int32_t* pending;
  const float* a;  // [H], Mamba-2
  StateCopy checkpoint;
  RingTensor value, key, decay, keyFactor, v, beta;
  float* state;  // [E, H, P, N]
};

struct ImportParams {
  int32_t states, slots, heads, headDim, stateDim, layer, headOffset;
  const int32_t* slot;
  int64_t slotStride;
  const int32_t* position;
  int64_t positionStride;
  const int64_t* seed;
  int64_t seedStride;
  StateCopy checkpoint, read;
  const float* state;  // [E, H, P, N]
};

cudaError_t launchExport(const ExportParams& p, cudaStream_t stream);
cudaError_t launchImport(const ImportParams& p, cudaStream_t stream);

}  // namespace replayssm
