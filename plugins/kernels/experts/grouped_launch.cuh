// The launch of a grouped product: ring, rounds and grid from sizes and device.
#pragma once

#include "kernel.cuh"
#include "kernels/common/launch.cuh"

namespace replayssm {
namespace {

// What the device gives: shared memory of a multiprocessor and of a block, and its number of multiprocessors.
struct Device {
  int sharedBytes = 0, blockBytes = 0, multiprocessors = 0;
};

cudaError_t queryDevice(Device& device) {
  int index = 0;
  cudaError_t code = cudaGetDevice(&index);
  const auto read = [&](int& value, cudaDeviceAttr attribute) {
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&value, attribute, index);
  };
  read(device.sharedBytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  read(device.blockBytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  read(device.multiprocessors, cudaDevAttrMultiProcessorCount);
  return code;
}

template <class T>
cudaError_t launchTraits(GroupedParams p, cudaStream_t stream) {
  Device device;
  const cudaError_t code = queryDevice(device);
  if (code != cudaSuccess) return code;
  constexpr int kReserved = 1024 + static_cast<int>(sizeof(BlockState)) + 128;  // of a block, beside the ring
  constexpr int kFewStages = 3;  // fewer leave too few bytes on their way: then a block has a multiprocessor alone
  p.stageBytes = T::stageBytes(p.passTokens);
  p.steps = (p.columns + kLayoutColumns - 1) / kLayoutColumns * (kLayoutColumns / T::Format::kStepColumns);
  p.groups = (p.tiles + kLayoutTiles - 1) / kLayoutTiles;
  int blocks = T::kBlocks;
  int stages = (device.sharedBytes / blocks - kReserved) / p.stageBytes;
  if (stages < kFewStages) {
    blocks = 1;
    stages = (device.blockBytes - kReserved) / p.stageBytes;
  }
  if (stages < 2) return cudaErrorInvalidConfiguration;
  p.stages = stages < kMostStages ? stages : kMostStages;
  return launchLarge(stream, p.programmaticLaunch, groupedKernel<T>,
                     dim3(static_cast<unsigned>(device.multiprocessors * blocks)), T::kThreads,
                     p.stageBytes * p.stages, p);
}

}  // namespace
}  // namespace replayssm
