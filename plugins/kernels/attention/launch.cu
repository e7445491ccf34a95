// The choice of the attention kernel by type, head size and query rows, and of the parts its keys are cut into.
#include "decode.cuh"
#include "inputs.cuh"
#include "kernels/common/launch.cuh"
#include "merge.cuh"

namespace replayssm {
namespace {

constexpr int kMaxSplits = 64;
constexpr int kMinPartKeys = 4 * kPassKeys;  // below that a part costs more than it saves
constexpr int kWideSize = 128;               // larger heads leave registers for one tile of query rows, not two

int queryRows(const AttentionParams& p) { return p.tokens * (p.heads / p.kvHeads); }

int tilesOf(const AttentionParams& p) { return queryRows(p) > 16 && p.size <= kWideSize ? 2 : 1; }

int rowBlocks(const AttentionParams& p) { return (queryRows(p) + 16 * tilesOf(p) - 1) / (16 * tilesOf(p)); }

template <class Act, int kSize, int kTiles>
cudaError_t launchStep(const AttentionParams& p, cudaStream_t stream) {
  using Traits = AttentionTraits<Act, kSize, kTiles>;
  const auto kernel = attentionKernel<Act, kSize, kTiles>;
  cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kShared);
  if (code != cudaSuccess) return code;
  const dim3 grid(static_cast<unsigned>(p.splits), static_cast<unsigned>(p.kvHeads * rowBlocks(p)),
                  static_cast<unsigned>(p.rows));
  return launchShared(stream, p.programmaticLaunch, kernel, grid, 32 * kAttentionWarps, Traits::kShared, p);
}

template <class Act, int kSize>
cudaError_t chooseTiles(const AttentionParams& p, cudaStream_t stream) {
  return tilesOf(p) == 2 ? launchStep<Act, kSize, 2>(p, stream) : launchStep<Act, kSize, 1>(p, stream);
}

template <class Act>
cudaError_t chooseSize(const AttentionParams& p, cudaStream_t stream) {
  cudaError_t code = cudaSuccess;
  if (p.size <= 64) {
    code = chooseTiles<Act, 64>(p, stream);
  } else if (p.size <= kWideSize) {
    code = chooseTiles<Act, 128>(p, stream);
  } else {
    code = launchStep<Act, 256, 1>(p, stream);
  }
  if (code != cudaSuccess || p.splits == 1) return code;
  const dim3 grid(static_cast<unsigned>((p.heads + kMergeWarps - 1) / kMergeWarps), static_cast<unsigned>(p.tokens),
                  static_cast<unsigned>(p.rows));
  return launchOn(stream, p.programmaticLaunch, mergeKernel<Act>, grid, 32 * kMergeWarps, p);
}

template <class Act>
cudaError_t launchInputs(const AttentionInputsParams& p, cudaStream_t stream) {
  const int heads = p.heads + 2 * p.kvHeads;
  const dim3 grid(static_cast<unsigned>((heads + kInputWarps - 1) / kInputWarps), static_cast<unsigned>(p.tokens),
                  static_cast<unsigned>(p.rows));
  return launchOn(stream, p.programmaticLaunch, attentionInputsKernel<Act>, grid, 32 * kInputWarps, p);
}

}  // namespace

int attentionSplits(const AttentionParams& p, int multiprocessors) {
  const int resident = p.size <= 64 ? 4 : p.size <= kWideSize ? 2 : 1;  // blocks of a multiprocessor, by shared memory
  const int64_t blocks = static_cast<int64_t>(p.rows) * p.kvHeads * rowBlocks(p);
  const int64_t wanted = blocks > 0 ? static_cast<int64_t>(multiprocessors) * resident / blocks : 1;
  const int useful = p.depth / kMinPartKeys < kMaxSplits ? p.depth / kMinPartKeys : kMaxSplits;
  const int64_t splits = wanted < useful ? wanted : useful;
  return splits < 1 ? 1 : static_cast<int>(splits);
}

cudaError_t launchAttentionInputs(const AttentionInputsParams& p, cudaStream_t stream) {
  return p.float16 ? launchInputs<__half>(p, stream) : launchInputs<__nv_bfloat16>(p, stream);
}

cudaError_t launchAttention(const AttentionParams& p, cudaStream_t stream) {
  return p.float16 ? chooseSize<__half>(p, stream) : chooseSize<__nv_bfloat16>(p, stream);
}

}  // namespace replayssm
