// The draw's two launches: the scan, then one block a position with shared memory for the sums of its chunks.
#include "kernel.cuh"
#include "kernels/common/launch.cuh"
#include "scan.cuh"

namespace replayssm {

cudaError_t launchDraw(const DrawParams& p, cudaStream_t stream) {
  const auto positions = static_cast<unsigned>(p.rows * p.width);
  const dim3 pieces(positions, static_cast<unsigned>(p.pieces));
  const auto scan = p.wide ? scanKernel<true> : scanKernel<false>;
  const cudaError_t code = launchOn(stream, false, scan, pieces, kScanThreads, p);
  if (code != cudaSuccess) return code;
  const int chunks = (p.vocab + kDrawChunk - 1) / kDrawChunk;
  const int sharedBytes = p.row == nullptr ? 0 : chunks * static_cast<int>(sizeof(float));
  return launchShared(stream, true, drawKernel, dim3(positions), kDrawThreads, sharedBytes, p);
}

}  // namespace replayssm
