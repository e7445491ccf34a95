// What compute-sanitizer's racecheck says of a buffer that a warp hands back to its producer by an mbarrier. Only the
// last way is a race:
//   kLaneZero  all lanes read, __syncwarp, lane 0 arrives: as the kernels do it
//   kEveryLane all lanes read, __syncwarp, every lane arrives: as a build with REPLAYSSM_EVERY_LANE_ARRIVES does
//   kRace      all lanes read, lane 0 arrives without __syncwarp
// each with buffers that are filled by ordinary stores and by asynchronous copies.
//   nvcc -arch=sm_90 -o handover tests/tools/handover.cu && compute-sanitizer --tool racecheck ./handover
#include <cstdint>
#include <cstdio>

enum Way { kLaneZero, kEveryLane, kRace };

constexpr int kRounds = 8;

__device__ uint32_t sharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sharedAddress(barrier)), "r"(arrivals) : "memory");
}

__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sharedAddress(barrier)) : "memory");
}

__device__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(sharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// Warp 0 fills, warp 1 reads. in [kRounds, 32], out [32].
template <Way kWay, bool kAsync>
__global__ void handover(const int4* in, int* out) {
  __shared__ __align__(128) int4 buffer[32];
  __shared__ uint64_t full, empty;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    init(&full, 32);
    init(&empty, kWay == kEveryLane ? 32 : 1);
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < kRounds; ++i) {
    if (warp == 0) {
      if (i > 0) wait(&empty, (i - 1) & 1);
      if constexpr (kAsync) {
        const uint32_t to = sharedAddress(&buffer[lane]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + i * 32 + lane) : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(sharedAddress(&full)) : "memory");
      } else {
        buffer[lane] = in[i * 32 + lane];
        arrive(&full);
      }
    } else {
      wait(&full, i & 1);
      sum += reinterpret_cast<const int*>(buffer)[(lane * 5 + i) % 128];
      if constexpr (kWay != kRace) __syncwarp();
      if (kWay == kEveryLane || lane == 0) arrive(&empty);
    }
  }
  if (warp == 1) out[lane] = sum;
  asm volatile("cp.async.wait_all;" ::: "memory");
}

template <Way kWay, bool kAsync>
bool run(const char* way, const int4* in, int* out) {
  handover<kWay, kAsync><<<2, 64>>>(in, out);
  const cudaError_t code = cudaDeviceSynchronize();
  std::printf("%s, %s: %s\n", way, kAsync ? "asynchronous copies" : "stores", cudaGetErrorString(code));
  return code == cudaSuccess;
}

int main() {
  int4* in = nullptr;
  int* out = nullptr;
  const size_t bytes = kRounds * 32 * sizeof(int4);
  if (cudaMalloc(&in, bytes) != cudaSuccess || cudaMalloc(&out, 32 * sizeof(int)) != cudaSuccess ||
      cudaMemset(in, 1, bytes) != cudaSuccess) {
    std::fprintf(stderr, "handover: no GPU memory\n");
    return 1;
  }
  const bool ran = run<kLaneZero, false>("lane 0 behind __syncwarp", in, out) &&
                   run<kLaneZero, true>("lane 0 behind __syncwarp", in, out) &&
                   run<kEveryLane, false>("every lane", in, out) && run<kEveryLane, true>("every lane", in, out) &&
                   run<kRace, false>("lane 0 without __syncwarp", in, out) &&
                   run<kRace, true>("lane 0 without __syncwarp", in, out);
  return ran ? 0 : 1;
}
