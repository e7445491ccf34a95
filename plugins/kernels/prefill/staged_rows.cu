// The rows of a prompt chunk as state export and import take them: whose state starts from the pool, whose ends there.
#include "dispatch.h"
#include "source.cuh"

namespace replayssm {
namespace {

constexpr int kThreads = 128;

__global__ void stagedRowsKernel(const PrefillParams p, const StagedRows rows) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= p.rows) return;
  const PromptRow r = PromptRow::load(p, row);
  const bool fromPool = (r.flags & (kFromZero | kFromCarry)) == 0, toPool = (r.flags & kToCarry) == 0;
  rows.source[row] = fromPool ? r.slot : -1;
  rows.target[row] = toPool ? r.slot : -1;
  rows.position[row] = r.slot >= 0 && p.position != nullptr ? p.position[r.slot] + r.tokens : 0;
  rows.seed[row] = r.slot >= 0 && p.seed != nullptr ? p.seed[r.slot] : 0;
}

}  // namespace

cudaError_t launchStagedRows(const PrefillParams& p, const StagedRows& rows, cudaStream_t stream) {
  stagedRowsKernel<<<(p.rows + kThreads - 1) / kThreads, kThreads, 0, stream>>>(p, rows);
  return cudaGetLastError();
}

}  // namespace replayssm
