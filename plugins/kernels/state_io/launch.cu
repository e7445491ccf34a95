// Launches of state export and import.
#include <cmath>

#include "export.cuh"
#include "import.cuh"

namespace replayssm {
namespace {

template <class Act, int kChunks>
cudaError_t launch(const ExportParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.headDim + kBlockRows - 1) / kBlockRows), static_cast<unsigned>(p.heads),
                  static_cast<unsigned>(p.states));
  const size_t sharedBytes = sizeof(ExportRecords) + static_cast<size_t>(p.window) * p.stateDim * sizeof(uint16_t);
  exportKernel<Act, kChunks><<<grid, 32 * kExportWarps, sharedBytes, stream>>>(p);
  return cudaGetLastError();
}

template <class Act>
cudaError_t chooseChunks(const ExportParams& p, cudaStream_t stream) {
  return p.stateDim <= kChunkColumns ? launch<Act, 1>(p, stream) : launch<Act, 2>(p, stream);
}

}  // namespace

cudaError_t launchExport(const ExportParams& p, cudaStream_t stream) {
  return p.float16 ? chooseChunks<__half>(p, stream) : chooseChunks<__nv_bfloat16>(p, stream);
}

cudaError_t launchImport(const ImportParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.states));
  importKernel<<<grid, 32 * kImportWarps, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace replayssm
