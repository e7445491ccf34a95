// Launches of the routed experts: the plan, the two products, the sum over a token's choices.
#include "grouped_launch.cuh"
#include "kernels/common/cluster_launch.cuh"
#include "plan.cuh"
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
  const int bytes = (kPlanWarps + 1) * p.experts * static_cast<int>(sizeof(int32_t));
  const int cluster = int64_t{p.tokens} * p.topK > kPlanAlonePairs ? kPlanCluster : 1;
  const int64_t units = p.order.in == nullptr ? 0 : int64_t{p.tokens} * (p.order.columns / 32);
  const int64_t wanted = (units + kPlanThreads * cluster - 1) / (kPlanThreads * cluster);
  const int clusters = 1 + static_cast<int>(wanted < kOrderBlocks / cluster ? wanted : kOrderBlocks / cluster);
  return launchClusters(stream, p.programmaticLaunch, planKernel, clusters * cluster, cluster, kPlanThreads, bytes, p);
}

cudaError_t launchGrouped(const GroupedParams& p, cudaStream_t stream) {
  switch (p.format) {
    case WeightFormat::kNvfp4: return launchFormat<Nvfp4Weights>(p, stream);
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
