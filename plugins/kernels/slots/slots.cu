// Slots that change hands: cursors by one thread a slot, states by a grid that writes 16 bytes a thread where it can.
#include "slots.h"

namespace replayssm {
namespace {

constexpr int kThreads = 128;
constexpr int kFillThreads = 256;
constexpr int kMaxBlocksPerSlot = 64;

__global__ void resetKernel(const ResetParams p) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= p.slots.count) return;
  const int slot = p.slots.slot[i * p.slots.stride];
  if (slot < 0 || slot >= p.slots.slots) return;
  p.origin[slot] = 0;
  p.pending[slot] = 0;
  p.position[slot] = p.newPosition == nullptr ? 0 : p.newPosition[i * p.newPositionStride];
  p.seed[slot] = p.newSeed[i * p.newSeedStride];
}

__global__ void fillKernel(const FillParams p) {
  const int slot = p.slots.slot[blockIdx.y * p.slots.stride];
  if (slot < 0 || slot >= p.slots.slots) return;
  char* const at = static_cast<char*>(p.data) + slot * p.slotStrideBytes;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kFillThreads;
  // The vectors of the slot, then what is left; a slot at an odd address is all rest.
  const int64_t vectors = reinterpret_cast<uintptr_t>(at) % 16 == 0 ? p.slotBytes / 16 : 0;
  const uint4 word = {p.pattern, p.pattern, p.pattern, p.pattern};
  for (int64_t i = thread; i < vectors; i += threads) reinterpret_cast<uint4*>(at)[i] = word;
  for (int64_t i = vectors * 16 + thread; i < p.slotBytes; i += threads) {
    at[i] = static_cast<char>(p.pattern >> (i % 4 * 8));
  }
}

}  // namespace

cudaError_t launchReset(const ResetParams& p, cudaStream_t stream) {
  resetKernel<<<(p.slots.count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launchFill(const FillParams& p, cudaStream_t stream) {
  const int64_t blocks = (p.slotBytes + 16 * kFillThreads - 1) / (16 * kFillThreads);
  const dim3 grid(static_cast<unsigned>(blocks < kMaxBlocksPerSlot ? blocks : kMaxBlocksPerSlot),
                  static_cast<unsigned>(p.slots.count));
  fillKernel<<<grid, kFillThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace replayssm
