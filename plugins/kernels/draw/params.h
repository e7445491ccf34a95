// The draw as the ABI layer sees it: plain data, checked there; strides in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

struct DrawParams {
  int32_t rows, width, vocab;
  int32_t entries;  // of settings
  bool wide;        // every position's logits are whole aligned pieces of 4

  const float* logits;
  const int64_t* row;
  const int64_t* length;
  const int64_t* seed;
  const float* temperature;
  const int64_t* topK;
  const float* topP;
  const float* minP;
  int64_t* tokens;
  int32_t* finite;
  int64_t rowStride, positionStride;  // of logits
};

constexpr int kDrawThreads = 384;
constexpr int kDrawChunk = 128;  // tokens of a warp's piece: 4 a lane
constexpr int kMaxDrawVocab = 1 << 20;  // one float of shared memory a chunk

cudaError_t launchDraw(const DrawParams& p, cudaStream_t stream);

}  // namespace replayssm
