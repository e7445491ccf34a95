// The choice of the attention kernel by type, head size and query rows, and of the parts its keys are cut into.
#include "decode.cuh"
#include "inputs.cuh"
#include "kernels/common/launch.cuh"
#include "merge.cuh"

namespace replayssm {
namespace {

constexpr int kMinPartKeys = 64;  // below that a part costs more than it saves
constexpr int kWideSize = 128;    // larger heads leave registers for one tile of query rows a warp, not two

int queryRows(const AttentionParams& p) { return p.tokens * (p.heads / p.kvHeads); }

template <class Traits>
int rowBlocks(const AttentionParams& p) {
  return (queryRows(p) + Traits::kRows - 1) / Traits::kRows;
}

// Blocks of one multiprocessor at once, by shared memory.
template <class Traits>
int residentBlocks() {
  constexpr int kMultiprocessorBytes = 227 << 10, kReserved = 2 << 10;
  return kMultiprocessorBytes / (Traits::kShared + kReserved);
}

template <class Traits>
cudaError_t launchStep(const AttentionParams& p, cudaStream_t stream) {
  const auto kernel = attentionKernel<Traits>;
  cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kShared);
  if (code != cudaSuccess) return code;
  const dim3 grid(static_cast<unsigned>(p.splits), static_cast<unsigned>(p.kvHeads * rowBlocks<Traits>(p)),
                  static_cast<unsigned>(p.rows));
  return launchShared(stream, p.programmaticLaunch, kernel, grid, Traits::kThreads, Traits::kShared, p);
}

// Calls visitor with the kernel's traits: few rows divide the keys over two warps, many rows share them.
template <class Act, class Visitor>
auto withTraits(const AttentionParams& p, Visitor visit) {
  const int rows = queryRows(p);
  if (p.size > kWideSize) {
    if (rows > 32) return visit(AttentionTraits<Act, 256, 1, 4, 1>{});
    if (rows > 16) return visit(AttentionTraits<Act, 256, 1, 2, 1>{});
    return visit(AttentionTraits<Act, 256, 1, 1, 2>{});
  }
  if (p.size > 64) {
    if (rows > 32) return visit(AttentionTraits<Act, 128, 2, 2, 1>{});
    if (rows > 16) return visit(AttentionTraits<Act, 128, 2, 1, 2>{});
    return visit(AttentionTraits<Act, 128, 1, 1, 2>{});
  }
  if (rows > 16) return visit(AttentionTraits<Act, 64, 2, 1, 2>{});
  return visit(AttentionTraits<Act, 64, 1, 1, 2>{});
}

template <class Act>
cudaError_t launchParts(const AttentionParams& p, cudaStream_t stream) {
  const cudaError_t code =
      withTraits<Act>(p, [&](auto traits) { return launchStep<decltype(traits)>(p, stream); });
  if (code != cudaSuccess || p.splits == 1) return code;
  const dim3 grid(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.tokens), static_cast<unsigned>(p.rows));
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
  // the traits of both types are alike
  const int64_t perSplit = withTraits<__nv_bfloat16>(p, [&](auto traits) { return rowBlocks<decltype(traits)>(p); });
  const int resident = withTraits<__nv_bfloat16>(p, [](auto traits) { return residentBlocks<decltype(traits)>(); });
  const int64_t blocks = perSplit * p.rows * p.kvHeads;
  const int64_t wanted = blocks > 0 ? static_cast<int64_t>(multiprocessors) * resident / blocks : 1;
  const int useful = p.depth / kMinPartKeys < kMaxSplits ? p.depth / kMinPartKeys : kMaxSplits;
  const int64_t splits = wanted < useful ? wanted : useful;
  return splits < 1 ? 1 : static_cast<int>(splits);
}

cudaError_t launchAttentionInputs(const AttentionInputsParams& p, cudaStream_t stream) {
  return p.float16 ? launchInputs<__half>(p, stream) : launchInputs<__nv_bfloat16>(p, stream);
}

cudaError_t launchAttention(const AttentionParams& p, cudaStream_t stream) {
  return p.float16 ? launchParts<__half>(p, stream) : launchParts<__nv_bfloat16>(p, stream);
}

}  // namespace replayssm
