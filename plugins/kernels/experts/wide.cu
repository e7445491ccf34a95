// Launches of products by the instructions of a warpgroup. Built for sm_90a alone.
#include "grouped_launch.cuh"

namespace replayssm {

namespace {

template <class Format>
cudaError_t launchFormat(const GroupedParams& p, cudaStream_t stream) {
  if (p.passTokens <= 32) return launchTraits<GroupedTraits<Format, 4, true>>(p, stream);
  return launchTraits<GroupedTraits<Format, 8, true>>(p, stream);
}

}  // namespace

cudaError_t launchWide(const GroupedParams& p, cudaStream_t stream) {
  switch (p.format) {
    case WeightFormat::kNvfp4: return launchFormat<Nvfp4Weights>(p, stream);
    case WeightFormat::kFp8: return launchFormat<Fp8Weights>(p, stream);
    default: return launchFormat<Bfloat16Weights>(p, stream);
  }
}

}  // namespace replayssm
