// The cursor commit as the ABI layer sees it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

struct CommitParams {
  int32_t rows, slots, window, ringRows;  // B, S, L, C
  const int32_t* slot;
  int64_t slotStride;
  const int32_t* numTokens;
  int64_t numTokensStride;
  const int32_t* accepted;
  int64_t acceptedStride;
  int32_t* origin;
  int32_t* pending;
  int32_t* position;
};

struct EntryCommitParams {
  int32_t rows, slots, entries;  // B, S, E
  const int32_t* slot;
  int64_t slotStride;
  const int32_t* numTokens;
  int64_t numTokensStride;
  const int32_t* accepted;
  int64_t acceptedStride;
  int32_t* entry;
  int32_t* position;
};

cudaError_t launchCommit(const CommitParams& p, cudaStream_t stream);
cudaError_t launchEntryCommit(const EntryCommitParams& p, cudaStream_t stream);

}  // namespace replayssm
