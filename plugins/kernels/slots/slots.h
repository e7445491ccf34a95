// Resetting slots as the ABI layer sees it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

struct SlotList {
  int32_t count;
  int32_t slots;        // S; no other slot exists
  const int32_t* slot;  // -1 = skip
  int64_t stride;
};

struct ResetParams {
  SlotList slots;
  const int64_t* newSeed;
  int64_t newSeedStride;
  const int32_t* newPosition;  // null: 0
  int64_t newPositionStride;
  int32_t* origin;
  int32_t* pending;
  int32_t* position;
  int64_t* seed;
};

// A slot's contiguous bytes, filled with a repeated byte or 32-bit word.
struct FillParams {
  SlotList slots;
  void* data;
  int64_t slotBytes, slotStrideBytes;
  uint32_t pattern;  // four bytes; all equal unless the elements are 32 bits wide
};

cudaError_t launchReset(const ResetParams& p, cudaStream_t stream);
cudaError_t launchFill(const FillParams& p, cudaStream_t stream);

}  // namespace replayssm
