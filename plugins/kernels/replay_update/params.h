// What a launch of the update family reads, as plain data: pointers, strides in elements, sizes. Filled once by the ABI
// layer after validation; no kernel re-checks it.
#pragma once

#include <cstdint>

#include "../common/token_tensor.h"

namespace replayssm {

enum class StateFormat : int32_t { kFloat32, kFloat16, kE4m3, kE2m1 };

// One copy of the states [S, H, P, N] with its scales, see update.h; all axes but the slot's are contiguous.
struct CheckpointCopy {
  void* data;
  int64_t slotBytes;
  void* scale;  // one float32 per 128 columns (E4M3), one E4M3 number per 16 (E2M1), or null
  int64_t scaleSlotBytes;
  float* headScale;  // [S, H]; E2M1
  int64_t headScaleSlotStride;
};

// How the heads of all rows are dealt out to persistent workers: `rounds` times a run of roundHeads to each worker in turn,
// then `pieces` runs from head `base` on, of which each worker has one and draws more: `large` of pieceHeads, then single
// heads.
struct WorkDeal {
  int32_t rounds, roundHeads, pieceHeads, base, large, pieces;
};

struct UpdateParams {
  int32_t rows, tokens, heads, groups, headsPerGroup;  // B, T, H, G, H / G
  int32_t headDim, stateDim;                           // P, N
  int32_t window, ringRows;                            // L, C
  int32_t slots;                       // S
  int32_t multiprocessors;
  WorkDeal deal;
  bool programmaticLaunch;
  bool settled;  // with it: slots, cursors, checkpoints and rings may be read before the predecessor ends

  uint32_t* tickets;  // [2] in the workspace, zero between launches

  const int32_t* slot;  // [B], -1 = padding
  int64_t slotStride;
  const int32_t* numTokens;  // [B]
  int64_t numTokensStride;
  const int32_t* origin;  // [S]
  const int32_t* pending;  // [S], h

  TokenTensor value;  // act
  TokenTensor k, q;   // act
  TokenTensor dt;     // float32 [B, T, H]; Mamba-2 dt, GDN log-decay
  TokenTensor beta;   // float32 [B, T, H]; GDN
  const float* a;     // [H]
  const float* skip;  // [H] or null
  void* out;          // act [B, T, H, P]
  int64_t outRowStride, outTokenStride, outHeadStride;

  // What stochastic rounding is keyed by.
  int32_t layer, headOffset;
  const int64_t* seed;      // [S]
  const int32_t* position;  // [S], tokens committed

  CheckpointCopy recurrence, read;  // the same where one copy serves both
  float* checkpoint;  // [S, H, P, N], all but the slot axis contiguous; float32 states, as recurrence
  int64_t checkpointSlotStride;
  void* ringValue;  // [S, H, C, P], likewise; Mamba-2 x in act, GDN u in float16
  int64_t ringValueSlotStride;
  void* ringKey;  // [S, G, C, N], likewise
  int64_t ringKeySlotStride;
  float* ringDt;  // [S, H, C], likewise; Mamba-2 dt, GDN log-decay
  int64_t ringDtSlotStride;
  void* ringV;  // [S, H, C, P] act, likewise; GDN that derives its corrections anew
  int64_t ringVSlotStride;
  float* ringBeta;  // [S, H, C], likewise
  int64_t ringBetaSlotStride;
  float* ringKeyFactor;  // [S, G, C], likewise; GDN
  int64_t ringKeyFactorSlotStride;
};

}  // namespace replayssm
