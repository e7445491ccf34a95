// The sum over ranks as the ABI layer sees it: plain data, checked there; strides in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "replayssm/sum_ranks.h"

namespace replayssm {

constexpr int kSumVector = 8;  // channels of one access
constexpr int kMaxSumThreads = 1024;

struct SumRanksParams {
  int32_t rows, size, capacity;
  int32_t rank, ranks;
  float eps, weightOffset;
  bool float16;  // activations; else bfloat16
  bool programmaticLaunch;
  uint64_t patience;  // nanoseconds

  void* inbox[RSSM_MAX_RANKS];
  const void* x;
  const void* residual;  // null: none
  const float* weight;   // null: no norm
  uint32_t* turn;
  uint32_t* gaveUp;
  void* sum;
  void* out;
  int64_t xStride, residualStride, sumStride, outStride;  // of a row
};

cudaError_t launchSumRanks(const SumRanksParams& p, cudaStream_t stream);

}  // namespace replayssm
