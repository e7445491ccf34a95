// The draw's launch: one block a position, shared memory for the sums of its chunks.
#include "kernel.cuh"
#include "kernels/common/launch.cuh"

namespace replayssm {

cudaError_t launchDraw(const DrawParams& p, cudaStream_t stream) {
  const int chunks = (p.vocab + kDrawChunk - 1) / kDrawChunk;
  const dim3 grid(static_cast<unsigned>(p.rows * p.width));
  return launchShared(stream, false, drawKernel, grid, kDrawThreads, chunks * static_cast<int>(sizeof(float)), p);
}

}  // namespace replayssm
