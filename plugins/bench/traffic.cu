#include "bench/traffic.h"

#include <algorithm>

#include "bench/traffic_move.cuh"

namespace {

using namespace traffic;

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ void move(const Traffic& t, int runHeads, int room) {
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x;
  const Stages stages = Stages::of(t, room);
  const uint32_t base = sharedAddress(shared);
  const Mover mover{t, stages, shared, base, base + static_cast<uint32_t>(stages.count * stages.bytes), lane};
  if (lane < stages.count) barrierInit(mover.full(lane), 1);
  barrierInitFence();
  __syncwarp();
  releaseDependents();
  Walk walk(t, runHeads, lane);
  int loaded = 0;
  for (; loaded < stages.count && !walk.ended(); ++loaded, walk.advance()) mover.load(loaded, walk);
  for (int stored = 0; stored < loaded; ++stored) {
    const int at = stored % stages.count;
    barrierWait(mover.full(at), stored / stages.count & 1);
    mover.store(at);
    if (stored == 0 || walk.ended()) continue;
    // Into the stage of the item before this one.
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    __syncwarp();
    mover.load(loaded++ % stages.count, walk);
    walk.advance();
  }
  walk.finish();
  loadsDrain();
  bulkWait();
}

#endif

__global__ void __launch_bounds__(kLanes) trafficKernel(const __grid_constant__ Traffic t, int runHeads, int room) {
#if __CUDA_ARCH__ >= 900
  move(t, runHeads, room);
#endif
}

// Bytes of shared memory that each of `workers` CTAs of a multiprocessor can have; 0: no device with bulk copies.
int roomFor(int workers) {
  int device = 0, major = 0, shared = 0, most = 0;
  constexpr int kReserved = 1024;  // of each CTA, by the driver
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess || major < 9 ||
      cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    return 0;
  }
  return std::min(shared / workers - kReserved, most);
}

}  // namespace

bool trafficFits(const Traffic& traffic, const TrafficLaunch& launch) {
  return traffic.window <= kLanes && traffic.tokens <= kLanes && traffic.heads / traffic.groups % launch.heads == 0 &&
         Stages::of(traffic, roomFor(launch.workers)).count >= 2;
}

cudaError_t launchTraffic(const Traffic& traffic, const TrafficLaunch& launch, cudaStream_t stream) {
  if (!trafficFits(traffic, launch)) return cudaErrorInvalidValue;
  const int room = roomFor(launch.workers);
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(trafficKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(multiprocessors * launch.workers);
  config.blockDim = kLanes;
  config.dynamicSmemBytes = static_cast<size_t>(room);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, trafficKernel, traffic, launch.heads, room);
}
