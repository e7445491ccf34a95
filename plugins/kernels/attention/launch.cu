// The choice of the attention kernel by type, head size and query rows, and of the parts its keys are cut into.
#include "decode.cuh"
#include "inputs.cuh"
#include "kernels/common/launch.cuh"
#include "merge.cuh"

namespace replayssm {
namespace {

constexpr int kMinPartKeys = 64;  // below that a part costs more than it saves

int queryRows(const AttentionParams& p) { return p.tokens * (p.heads / p.kvHeads); }

template <class Traits>
int rowBlocks(const AttentionParams& p) {
  return (queryRows(p) + Traits::kRows - 1) / Traits::kRows;
}

template <class Traits>
cudaError_t launchStep(const AttentionParams& p, cudaStream_t stream) {
  const auto kernel = attentionKernel<Traits>;
  const int64_t items = static_cast<int64_t>(p.rows) * p.kvHeads * rowBlocks<Traits>(p) * p.splits;
  const dim3 grid(static_cast<unsigned>(items < p.multiprocessors ? items : p.multiprocessors));
  return launchLarge(stream, p.programmaticLaunch, kernel, grid, Traits::kThreads, Traits::kShared, p,
                     static_cast<int>(items));
}

// Calls visitor with the kernel's traits: few rows divide the keys over the warps, many rows share them.
template <class Act, class Visitor>
auto withTraits(const AttentionParams& p, Visitor visit) {
  const int rows = queryRows(p);
  if (p.size > 128) {
    if (rows > 32) return visit(AttentionTraits<Act, 256, 2, 4, 1>{});
    if (rows > 16) return visit(AttentionTraits<Act, 256, 2, 2, 2>{});
    if (rows > 8) return visit(AttentionTraits<Act, 256, 2, 1, 4>{});
    return visit(AttentionTraits<Act, 256, 1, 1, 4>{});
  }
  if (p.size > 64) {
    if (rows > 32) return visit(AttentionTraits<Act, 128, 2, 4, 2>{});
    if (rows > 16) return visit(AttentionTraits<Act, 128, 3, 1, 4>{});
    if (rows > 8) return visit(AttentionTraits<Act, 128, 2, 1, 4>{});
    return visit(AttentionTraits<Act, 128, 1, 1, 4>{});
  }
  if (rows > 8) return visit(AttentionTraits<Act, 64, 4, 1, 4>{});
  return visit(AttentionTraits<Act, 64, 1, 1, 4>{});
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

int attentionSplits(const AttentionParams& p) {
  // the traits of both types are alike
  const int64_t perSplit = withTraits<__nv_bfloat16>(p, [&](auto traits) { return rowBlocks<decltype(traits)>(p); });
  const int64_t blocks = perSplit * p.rows * p.kvHeads;
  const int64_t wanted = blocks > 0 ? p.multiprocessors / blocks : 1;
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
