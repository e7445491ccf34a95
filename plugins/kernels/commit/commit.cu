// Moves the cursors of every row once per step: one thread a row, distinct slots, no communication.
#include "commit.h"

namespace replayssm {
namespace {

constexpr int kThreads = 128;

__global__ void commitKernel(const CommitParams p) {
  int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= p.rows) return;
  int slot = p.slot[row * p.slotStride];
  if (slot < 0 || slot >= p.slots) return;
  int tokens = min(max(p.numTokens[row * p.numTokensStride], 0), p.ringRows - p.window);
  int accepted = min(max(p.accepted[row * p.acceptedStride], 0), tokens);
  // Garbage in a slot nobody prepared is brought within bounds, as the updates take it.
  int pending = min(max(p.pending[slot], 0), p.window);
  int origin = min(max(p.origin[slot], 0), p.ringRows - 1);
  if (pending + tokens > p.window) {
    origin = (origin + pending) % p.ringRows;
    pending = 0;
  }
  p.origin[slot] = origin;
  p.pending[slot] = pending + accepted;
  p.position[slot] += accepted;
}

__global__ void entryCommitKernel(const EntryCommitParams p) {
  int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= p.rows) return;
  int slot = p.slot[row * p.slotStride];
  if (slot < 0 || slot >= p.slots) return;
  int tokens = min(max(p.numTokens[row * p.numTokensStride], 0), p.entries - 1);
  int accepted = min(max(p.accepted[row * p.acceptedStride], 0), tokens);
  p.entry[slot] = (max(p.entry[slot], 0) % p.entries + accepted) % p.entries;
  p.position[slot] += accepted;
}

}  // namespace

cudaError_t launchCommit(const CommitParams& p, cudaStream_t stream) {
  commitKernel<<<(p.rows + kThreads - 1) / kThreads, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launchEntryCommit(const EntryCommitParams& p, cudaStream_t stream) {
  entryCommitKernel<<<(p.rows + kThreads - 1) / kThreads, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace replayssm
