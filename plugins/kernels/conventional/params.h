// What a launch of the conventional step reads, as plain data; filled once by the ABI layer after validation.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

// A dense tensor [B, T, heads or groups, elements], the last axis contiguous.
struct TokenTensor {
  const void* data;
  int64_t rowStride, tokenStride, headStride;
};

struct ConventionalParams {
  int32_t rows, tokens, heads, headsPerGroup, headDim;  // B, T, H, H / G, P
  int32_t entries;                                      // E
  int32_t multiprocessors;
  bool gdn, half, programmaticLaunch;

  const int32_t* slot;  // [B], -1 = padding
  int64_t slotStride;
  const int32_t* numTokens;  // [B]
  int64_t numTokensStride;
  const int32_t* entry;  // [S] or null

  TokenTensor value, k, q;  // act
  TokenTensor dt;           // float32 [B, T, H]; Mamba-2 dt, GDN log-decay
  TokenTensor beta;         // float32 [B, T, H]; GDN
  const float* a;         // [H]
  const float* skip;      // [H] or null
  void* out;              // act [B, T, H, P]
  int64_t outRowStride, outTokenStride, outHeadStride;

  float* state;  // [S, E, H, P, N], the last three axes contiguous
  int64_t stateSlotStride, stateEntryStride;
};

// How a problem maps to a launch.
struct ConventionalLaunch {
  int stateRows;  // of P, per warp
  int warps;      // per CTA
  int grid;
};

constexpr int kConventionalStateDim = 128;  // N: 32 lanes hold 4 columns each

// Pure.
ConventionalLaunch chooseConventional(const ConventionalParams& p);

cudaError_t launchConventional(const ConventionalParams& p, cudaStream_t stream);

}  // namespace replayssm
