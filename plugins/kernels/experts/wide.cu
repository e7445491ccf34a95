// Launches of products by the instructions of a warpgroup. Built for sm_90a alone.
#include "grouped_launch.cuh"

namespace replayssm {

cudaError_t launchWide(const GroupedParams& p, cudaStream_t stream) {
  switch (p.format) {
    case WeightFormat::kNvfp4: return launchTraits<GroupedTraits<Nvfp4Weights, 8, true>>(p, stream);
    case WeightFormat::kFp8: return launchTraits<GroupedTraits<Fp8Weights, 8, true>>(p, stream);
    default: return launchTraits<GroupedTraits<Bfloat16Weights, 8, true>>(p, stream);
  }
}

}  // namespace replayssm
