// The beginning of an SSM layer as the ABI layer sees it: the convolution over its window, and optionally the decay
// inputs of the recurrence. Plain data, checked by the ABI layer; strides in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

enum class DecayKind : int32_t { kNone, kMamba2, kGdn };

struct ActTensor {  // [B, T, channels], the last axis contiguous
  const void* data;
  int64_t rowStride, tokenStride;
};

struct SsmInputsParams {
  int32_t rows, slots, tokens, channels, taps, ringRows;  // B, S, T, D, K, R
  int32_t multiprocessors;
  int32_t channelBlocks;  // filled by the launch: blocks of the convolution, those of the decay inputs follow
  bool float16;                          // activations; else bfloat16
  bool prompt;                           // a chunk of any length, else at most kTokenTile tokens
  bool programmaticLaunch;
  int32_t vector;  // channels a thread may take at a time: 4 where they divide D and everything is aligned, or 1

  const int32_t* slot;  // [B], -1 = padding
  int64_t slotStride;
  const int32_t* numTokens;  // [B]
  int64_t numTokensStride;
  const int32_t* position;  // [S]
  ActTensor x;
  const float* weight;  // [D, K]
  const float* bias;    // [D] or null
  void* window;         // [S, R, D] act
  int64_t windowSlotStride;
  void* out;  // [B, T, D] act
  int64_t outRowStride, outTokenStride;

  DecayKind decay;
  int32_t heads;  // H
  float dtLow, dtHigh;
  ActTensor decayIn, betaIn;  // [B, T, H]
  const float* dtBias;        // [H]
  const float* aLog;          // [H]
  float* decayOut;            // [B, T, H]
  float* betaOut;             // [B, T, H]
};

constexpr int kTokenTile = 16;  // tokens of a thread; a step has no more

cudaError_t launchSsmInputs(const SsmInputsParams& p, cudaStream_t stream);

}  // namespace replayssm
