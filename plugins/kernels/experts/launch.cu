// Launches of the routed experts: the plan, the two products, the sum over a token's choices.
#include "grouped_launch.cuh"
#include "cluster_plan.cuh"
#include "reduce.cuh"

namespace replayssm {
namespace {

template <class Format>
cudaError_t launchFormat(const GroupedParams& p, cudaStream_t stream) {
  if (p.passTokens <= 16) return launchTraits<GroupedTraits<Format, 2>>(p, stream);
  if (p.passTokens <= 32) return launchTraits<GroupedTraits<Format, 4>>(p, stream);
  return launchTraits<GroupedTraits<Format, 8>>(p, stream);
}

}  // namespace

cudaError_t launchPlan(const PlanParams& p, cudaStream_t stream) {
  const int bytes = kPlanWarps * p.experts * static_cast<int>(sizeof(int32_t));
  const int64_t pieces = p.order.out == nullptr ? 0 : int64_t{p.tokens} * p.order.columns / kOrderPiece;
  const dim3 grid(static_cast<unsigned>(1 + (pieces + kPlanThreads - 1) / kPlanThreads));
  return launchLarge(stream, p.programmaticLaunch, planKernel, grid, kPlanThreads, bytes, p);
}

cudaError_t launchClusterPlan(PlanParams p, cudaStream_t stream) {
  const int bytes = (kPlanWarps + 1) * p.experts * static_cast<int>(sizeof(int32_t));
  p.planBlocks = int64_t{p.tokens} * p.topK > kPlanAlonePairs ? kPlanCluster : 1;
  const int64_t pieces = p.order.out == nullptr ? 0 : int64_t{p.tokens} * p.order.columns / kOrderPiece;
  const int64_t blocks = p.planBlocks + (pieces + kPlanThreads - 1) / kPlanThreads;
  cudaError_t code = cudaFuncSetAttribute(clusterPlanKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (code != cudaSuccess) return code;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((blocks + p.planBlocks - 1) / p.planBlocks * p.planBlocks));
  config.blockDim = dim3(kPlanThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (p.planBlocks > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(p.planBlocks), 1, 1};
    ++config.numAttrs;
  }
  if (p.programmaticLaunch) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
    ++config.numAttrs;
  }
  return cudaLaunchKernelEx(&config, clusterPlanKernel, p);
}

cudaError_t launchGrouped(const GroupedParams& p, cudaStream_t stream) {
  if constexpr (kWideBuilt) {
    if (p.wide) return launchWide(p, stream);
  }
  switch (p.format) {
    case WeightFormat::kNvfp4:
      if (p.multiplied == 3) return launchFormat<Nvfp4Codes<3>>(p, stream);
      if (p.multiplied == 6) return launchFormat<Nvfp4Codes<6>>(p, stream);
      return launchFormat<Nvfp4Weights>(p, stream);
    case WeightFormat::kFp8: return launchFormat<Fp8Weights>(p, stream);
    default: return launchFormat<Bfloat16Weights>(p, stream);
  }
}

cudaError_t launchReduce(const ReduceParams& p, cudaStream_t stream) {
  const int runs = (p.channels + kReduceThreads * kReduceVector - 1) / (kReduceThreads * kReduceVector);
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>(runs));
  return launchOn(stream, true, reduceKernel, grid, kReduceThreads, p);
}

}  // namespace replayssm
