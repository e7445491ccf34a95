// Launches of the attention by the instructions of a warpgroup. Built for sm_90a alone.
#include "wide.cuh"

#include "launch.cuh"

namespace replayssm {
namespace {

template <class Traits>
cudaError_t launchTraits(const AttentionParams& p, cudaStream_t stream) {
  return launchItems<Traits>(wideAttentionKernel<Traits>, p, stream);
}

template <class Act>
cudaError_t chooseSize(const AttentionParams& p, cudaStream_t stream) {
  return p.size > 128 ? launchTraits<WideTraits<Act, 256>>(p, stream) : launchTraits<WideTraits<Act, 128>>(p, stream);
}

}  // namespace

cudaError_t launchWideAttention(const AttentionParams& p, cudaStream_t stream) {
  return p.float16 ? chooseSize<__half>(p, stream) : chooseSize<__nv_bfloat16>(p, stream);
}

}  // namespace replayssm
