// What a launch of the prompt scan reads, as plain data: pointers, strides in elements, sizes. Filled once by the ABI
// layer after validation; no kernel re-checks it.
#pragma once

#include <cstdint>

#include "../common/token_tensor.h"

namespace replayssm {

struct PrefillParams {
  int32_t rows, tokens, heads, groups, headsPerGroup;  // B, T, H, G, H / G
  int32_t headDim, stateDim;                           // P, N
  int32_t window, ringRows;                            // L, C
  int32_t layer, headOffset;
  int32_t slots, carries;  // S, K
  int32_t multiprocessors;
  int32_t splits;  // CTAs that share a head's state rows
  int32_t stages;  // chunks of inputs in shared memory, 1 or 2

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

  TokenTensor value;  // act
  TokenTensor k, q;   // act
  TokenTensor dt;     // float32 [B, T, H]; Mamba-2 dt, GDN log-decay
  TokenTensor beta;   // float32 [B, T, H]; GDN
  const float* a;      // [H]
  const float* skip;   // [H] or null
  void* out;           // act [B, T, H, P]
  int64_t outRowStride, outTokenStride, outHeadStride;

  float* checkpoint;  // [S, H, P, N], all but the slot axis contiguous
  int64_t checkpointSlotStride;
  float* carry;  // [K, H, P, N] or null
  int64_t carryStride;
  float* staged;  // [B, H, P, N] in place of the checkpoint, records already applied, or null

  const void* ringValue;  // [S, H, C, P], all but the slot axis contiguous; Mamba-2 x in act, GDN u in float16
  int64_t ringValueSlotStride;
  const void* ringKey;  // [S, G, C, N], likewise
  int64_t ringKeySlotStride;
  const float* ringDt;  // [S, H, C], likewise; Mamba-2 dt, GDN log-decay
  int64_t ringDtSlotStride;
  const float* ringKeyFactor;  // [S, G, C], likewise; GDN
  int64_t ringKeyFactorSlotStride;

  char* records;  // GDN: what the first kernel leaves to the second, see gdn_record.cuh
};

// What state export and import need to know of each row, [B]: the slot a staged state is read from and written to (-1:
// none), the tokens it has absorbed at the end, and the request's seed.
struct StagedRows {
  int32_t* source;
  int32_t* target;
  int32_t* position;
  int64_t* seed;
};

}  // namespace replayssm
