// The choice of the attention kernel by type, head size and query rows, and of the parts its keys are cut into.
#include "decode.cuh"
#include "inputs.cuh"
#include "launch.cuh"
#include "merge.cuh"

namespace replayssm {
namespace {

constexpr int kMinPartKeys = 64;  // below that a part costs more than it saves
constexpr int kNarrowRows = 32, kNarrowSize = 64;  // of these the instructions of a warpgroup would waste too much

// Whether the instructions of a warpgroup serve the step: they are built, and the device has them.
cudaError_t queryWide(const AttentionParams& p, bool& wide) {
  wide = false;
  if (queryRows(p) <= kNarrowRows || p.size <= kNarrowSize) return cudaSuccess;
  int device = 0, major = 0, minor = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code == cudaSuccess) code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (code == cudaSuccess) code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  wide = major == 9 && minor == 0;
  return code;
}

// Calls visitor with the kernel's traits: few rows divide the keys over the warps, many rows share them.
template <class Act, class Visitor>
auto withTraits(const AttentionParams& p, Visitor visit) {
  const int rows = queryRows(p);
  if (p.size > 128) {
    if (rows > 32) return visit(AttentionTraits<Act, 256, 2, 4, 1>{});
    if (rows > 16) return visit(AttentionTraits<Act, 256, 2, 2, 2>{});
    if (rows > 8) return visit(AttentionTraits<Act, 256, 1, 2, 4>{});
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
cudaError_t launchStep(const AttentionParams& p, cudaStream_t stream) {
  if constexpr (kWideBuilt) {
    bool wide = false;
    const cudaError_t code = queryWide(p, wide);
    if (code != cudaSuccess) return code;
    if (wide) return launchWideAttention(p, stream);
  }
  return withTraits<Act>(p, [&](auto traits) {
    using Traits = decltype(traits);
    return launchItems<Traits>(attentionKernel<Traits>, p, stream);
  });
}

template <class Act>
cudaError_t launchParts(const AttentionParams& p, cudaStream_t stream) {
  const cudaError_t code = launchStep<Act>(p, stream);
  if (code != cudaSuccess || p.splits == 1) return code;
  const dim3 grid(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.tokens), static_cast<unsigned>(p.rows));
  return launchOn(stream, p.programmaticLaunch, mergeKernel<Act>, grid, 32 * kMergeWarps, p);
}

template <class Act, int kLanes, int kTokens, bool kTurns>
cudaError_t launchTeams(const AttentionInputsParams& p, cudaStream_t stream) {
  constexpr int kTeams = kInputThreads / kLanes;
  const int heads = p.heads + 2 * p.kvHeads;
  const dim3 grid(static_cast<unsigned>((heads + kTeams - 1) / kTeams),
                  static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens), static_cast<unsigned>(p.rows));
  const auto kernel = attentionInputsKernel<Act, kLanes, kTokens, kTurns>;
  return launchOn(stream, p.programmaticLaunch, kernel, grid, kInputThreads, p);
}

template <class Act, int kLanes, bool kTurns>
cudaError_t launchLanes(const AttentionInputsParams& p, cudaStream_t stream) {
  if (p.tokens == 1) return launchTeams<Act, kLanes, 1, kTurns>(p, stream);
  return launchTeams<Act, kLanes, 64 / kLanes, kTurns>(p, stream);
}

template <class Act, bool kTurns>
cudaError_t chooseLanes(const AttentionInputsParams& p, cudaStream_t stream) {
  return p.size <= 16 * kHeadVector ? launchLanes<Act, 16, kTurns>(p, stream) : launchLanes<Act, 32, kTurns>(p, stream);
}

template <class Act>
cudaError_t launchInputs(const AttentionInputsParams& p, cudaStream_t stream) {
  return p.half > 0 ? chooseLanes<Act, true>(p, stream) : chooseLanes<Act, false>(p, stream);
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
