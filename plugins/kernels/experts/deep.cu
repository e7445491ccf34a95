// Launches of products of many tokens by the instructions of a warpgroup. Built for sm_90a alone.
#include "deep.cuh"
#include "grouped_launch.cuh"

namespace replayssm {
namespace {

template <class T>
cudaError_t launchTraitsDeep(GroupedParams p, cudaStream_t stream) {
  Device device;
  const cudaError_t code = queryDevice(device);
  if (code != cudaSuccess) return code;
  constexpr int kReserved = static_cast<int>(sizeof(DeepState)) + 128;  // of a block, beside the ring
  p.stageBytes = T::stageBytes(p.passTokens);
  p.steps = p.columns / T::Format::kStepColumns;
  p.groups = (p.tiles + kLayoutTiles - 1) / kLayoutTiles;
  const int stages = (device.blockBytes - kReserved) / p.stageBytes;
  if (stages < kPickWarps) return cudaErrorInvalidConfiguration;
  p.stages = stages < kMostStages ? stages : kMostStages;
  return launchLarge(stream, true, deepKernel<T>, dim3(static_cast<unsigned>(device.multiprocessors)), T::kThreads,
                     p.stageBytes * p.stages, p);
}

}  // namespace

int stepColumnsOf(WeightFormat format) {
  return format == WeightFormat::kNvfp4 ? Nvfp4Weights::kStepColumns : Fp8Weights::kStepColumns;
}

cudaError_t launchDeep(const GroupedParams& p, cudaStream_t stream) {
  switch (p.format) {
    case WeightFormat::kNvfp4: return launchTraitsDeep<DeepTraits<Nvfp4Weights, 16>>(p, stream);
    case WeightFormat::kFp8: return launchTraitsDeep<DeepTraits<Fp8Weights, 16>>(p, stream);
    default: return launchTraitsDeep<DeepTraits<Bfloat16Weights, 12>>(p, stream);  // registers are short for 16
  }
}

}  // namespace replayssm
