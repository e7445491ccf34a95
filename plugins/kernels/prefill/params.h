// What a launch of the prompt scan reads, as plain data: pointers, strides in elements, sizes. Filled once by the ABI
// layer after validation; no kernel re-checks it.
#pragma once

#include <cstdint>

namespace replayssm {

// A dense activation tensor [B, T, heads or groups, elements], the last axis contiguous.
struct PromptTensor {
  const void* data;
  int64_t rowStride, tokenStride, headStride;
};

enum class StateFormat : int32_t { kFloat32, kFloat16, kE4m3, kE2m1 };

// One copy of the states [S, H, P, N], all but the slot axis contiguous. Scales as prefill.h lays them out.
struct StateCopy {
  void* data;  // null: there is no such copy
  void* scale;
  float* headScale;
  int64_t slotStride, scaleSlotStride, headScaleSlotStride;
  StateFormat format;
};

struct PrefillParams {
  int32_t rows, tokens, heads, groups, headsPerGroup;  // B, T, H, G, H / G
  int32_t headDim, stateDim;                           // P, N
  int32_t window, ringRows;                            // L, C
  int32_t layer, headOffset;
  int32_t multiprocessors;
  int32_t splits;  // CTAs that share a head's state rows
  int32_t stages;  // chunks of inputs in shared memory, 1 or 2
  bool rederives;  // GDN: pending records carry v and beta, corrections are derived anew

  const int32_t* slot;  // [B], -1 = padding
  int64_t slotStride;
  const int32_t* numTokens;  // [B]
  int64_t numTokensStride;
  const int32_t* rowFlags;  // [B] or null
  int64_t rowFlagsStride;
  const int32_t* carryIndex;  // [B] or null
  int64_t carryIndexStride;
  const int32_t* origin;    // [S]
  const int32_t* pending;   // [S], h
  const int32_t* position;  // [S] or null
  const int64_t* seed;      // [S] or null

  PromptTensor value;  // act
  PromptTensor k, q;   // act
  PromptTensor dt;     // float32 [B, T, H]; Mamba-2 dt, GDN log-decay
  PromptTensor beta;   // float32 [B, T, H]; GDN
  const float* a;      // [H]
  const float* skip;   // [H] or null
  void* out;           // act [B, T, H, P]
  int64_t outRowStride, outTokenStride, outHeadStride;

  StateCopy checkpoint, read;
  float* carry;  // [K, H, P, N] or null
  int64_t carryStride;

  const void* ringValue;  // [S, H, C, P], all but the slot axis contiguous; what a pending record's value is
  int64_t ringValueSlotStride;
  const void* ringKey;  // [S, G, C, N], likewise
  int64_t ringKeySlotStride;
  const float* ringDt;  // [S, H, C], likewise; Mamba-2 dt, GDN log-decay
  int64_t ringDtSlotStride;
  const float* ringKeyFactor;  // [S, G, C], likewise; GDN
  int64_t ringKeyFactorSlotStride;
  const float* ringBeta;  // [S, H, C], likewise; GDN that re-derives
  int64_t ringBetaSlotStride;

  char* records;  // GDN: what the first kernel leaves to the second, see gdn_record.cuh
};

}  // namespace replayssm
