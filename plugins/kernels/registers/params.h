// Inputs and outcome of a step as the ABI layer sees them: plain data, checked there; all tensors contiguous.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

constexpr int kReportExtra = 3;  // columns behind a row's tokens

struct StepInputsParams {
  int32_t rows, width, slots, drafts;

  const int32_t* slot;
  const int64_t* last;
  const int64_t* room;
  const int64_t* draft;
  const int64_t* draftCount;
  int64_t* ids;
  int32_t* numTokens;
  int64_t* row;
};

struct StepOutcomeParams {
  int32_t rows, width, slots, drafts, stops;
  int64_t positions;

  const int32_t* slot;
  const int32_t* numTokens;
  const int64_t* tokens;
  const int32_t* finite;
  const int64_t* count;  // null: drafts that agree
  const int64_t* draft;
  const int64_t* stopIds;
  int64_t* last;
  int64_t* length;
  int64_t* room;
  int64_t* history;  // null: none
  int32_t* emitted;
  int64_t* report;
};

struct PromptLookupParams {
  int32_t rows, entries, drafts, maxNgram;
  int64_t positions;

  const int64_t* row;
  const int64_t* length;
  const int64_t* room;
  const int64_t* history;
  int64_t* draft;
  int64_t* draftCount;
};

cudaError_t launchStepInputs(const StepInputsParams& p, cudaStream_t stream);
cudaError_t launchStepOutcome(const StepOutcomeParams& p, cudaStream_t stream);
cudaError_t launchPromptLookup(const PromptLookupParams& p, cudaStream_t stream);

}  // namespace replayssm
