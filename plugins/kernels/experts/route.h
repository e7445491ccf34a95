// Routing as the ABI layer sees it: plain data, checked there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

constexpr int kRouteWarps = 4;         // tokens of a block
constexpr int kMostRouteExperts = 1024;
constexpr int kMostChoices = 32;       // a lane each
constexpr int kMostGroups = 32;

struct RouteParams {
  int32_t rows, tokens, experts, topK, groups, topkGroup;
  bool sigmoid, normTopk, programmaticLaunch;
  float scaling;
  const float* logits;
  int64_t rowStride, tokenStride;
  const float* bias;          // nullable
  const int32_t* slot;        // nullable
  const int32_t* numTokens;
  int32_t* ids;
  float* weights;
};

cudaError_t launchRoute(const RouteParams& p, cudaStream_t stream);

}  // namespace replayssm
