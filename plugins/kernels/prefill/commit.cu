// Moves the cursors of every row after a prompt chunk: one thread a row, distinct slots, no communication.
#include "dispatch.h"

namespace replayssm {
namespace {

constexpr int kThreads = 128;

__global__ void prefillCommitKernel(const PrefillCommitParams p) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= p.rows) return;
  const int slot = p.slot[row * p.slotStride];
  const int tokens = min(p.numTokens[row * p.numTokensStride], p.maxTokens);
  if (slot < 0 || slot >= p.slots || tokens <= 0) return;
  p.origin[slot] = 0;
  p.pending[slot] = 0;
  p.position[slot] += tokens;
}

}  // namespace

cudaError_t launchPrefillCommit(const PrefillCommitParams& p, cudaStream_t stream) {
  prefillCommitKernel<<<(p.rows + kThreads - 1) / kThreads, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace replayssm
