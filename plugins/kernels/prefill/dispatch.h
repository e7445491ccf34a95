// The prompt scan as the ABI layer sees it: no templates, no CUDA syntax.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "params.h"

namespace replayssm {

enum class PrefillFamily : int32_t { kMamba2, kGdn };
enum class PrefillActivation : int32_t { kBfloat16, kFloat16 };

// How a problem maps to a launch of the scan.
struct PrefillLaunch {
  int splits;       // CTAs that share a head's state rows
  int warps;        // of a CTA, 16 state rows each
  int stages;       // chunks of inputs in shared memory; 0: not even one fits
  int sharedBytes;
  size_t recordBytes;  // of workspace, GDN only
};

// A built kernel pair: its launch choice, a pure function of sizes, and the launch.
struct PrefillKernel {
  PrefillFamily family;
  PrefillActivation act;
  int stateDim, maxHeadDim;
  PrefillLaunch (*plan)(const PrefillParams&);
  cudaError_t (*launch)(const PrefillParams&, const PrefillLaunch&, cudaStream_t);
};

// The built kernel with the fewest warps that serves the problem, or null. Pure.
const PrefillKernel* findPrefill(PrefillFamily family, PrefillActivation act, const PrefillParams& p);

// One line per built combination.
const char* supportedPrefills();

cudaError_t launchStagedRows(const PrefillParams& p, const StagedRows& rows, cudaStream_t stream);

struct PrefillCommitParams {
  int32_t rows, slots, maxTokens;
  const int32_t* slot;
  int64_t slotStride;
  const int32_t* numTokens;
  int64_t numTokensStride;
  int32_t* origin;
  int32_t* pending;
  int32_t* position;
};

cudaError_t launchPrefillCommit(const PrefillCommitParams& p, cudaStream_t stream);

}  // namespace replayssm
