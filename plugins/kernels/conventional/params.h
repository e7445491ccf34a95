// What a launch of the conventional step and of the recovery step reads, as plain data; filled once by the ABI layer
// after validation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../common/token_tensor.h"

namespace replayssm {

constexpr int kConventionalStateDim = 128;  // N: 32 lanes hold 4 columns each

// The inputs of a row's tokens.
struct TokenInputs {
  TokenTensor value, k, q;  // act; q only where there are outputs
  TokenTensor dt;           // float32 [B, T, H]; Mamba-2 dt, GDN log-decay
  TokenTensor beta;         // float32 [B, T, H]; GDN
};

// States [S, H, P, N] float32, the last three axes contiguous. Absent: data is null.
struct StateTensor {
  float* data;
  int64_t slotStride;
};

// What both steps share.
struct StepParams {
  int32_t rows, tokens, heads, headsPerGroup, headDim;  // B, T, H, H / G, P
  int32_t multiprocessors;
  bool gdn, half, programmaticLaunch;

  const int32_t* slot;  // [B], -1 = padding
  int64_t slotStride;
  const int32_t* numTokens;  // [B]
  int64_t numTokensStride;

  TokenInputs inputs;
  const float* a;     // [H]
  const float* skip;  // [H] or null
  void* out;          // act [B, T, H, P]
  int64_t outRowStride, outTokenStride, outHeadStride;
};

struct ConventionalParams : StepParams {
  int32_t slots;         // S
  bool prefetches;       // states before the predecessor has ended: few rows, programmatic launch
  bool settled;          // slots and states may be read before the predecessor ends
  const int32_t* entry;  // [S] or null
  int32_t entries;       // E
  StateTensor state;     // [S, E, H, P, N]
  int64_t entryStride;
};

struct RecoveryParams : StepParams {
  int32_t maxReplayed;     // tokens of `cached`
  const int32_t* replayed;  // [B] cached tokens to apply first, clamped to 0..maxReplayed
  int64_t replayedStride;
  TokenInputs cached;
  StateTensor source, recovered, end;  // the latter two may be absent
};

// How a problem maps to a launch.
struct ConventionalLaunch {
  int stateRows;  // of P, per warp
  int warps;      // per CTA
  int grid;
};

// Pure.
ConventionalLaunch chooseConventional(const StepParams& p);

cudaError_t launchConventional(const ConventionalParams& p, cudaStream_t stream);
cudaError_t launchRecovery(const RecoveryParams& p, cudaStream_t stream);

}  // namespace replayssm
