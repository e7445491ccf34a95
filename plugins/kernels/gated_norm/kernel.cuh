// Group RMSNorm with a SiLU gate. A team of lanes owns a group of channels, 8 channels a lane, of one token or of a few
// that it loads at once. The order of a sum depends on the group's size alone, so a token's bits do not depend on the
// batch.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"

namespace replayssm {

constexpr int kNormVector = 8;      // channels of a lane
constexpr int kMinNormThreads = 128;  // of a block: several teams where one is smaller

// Where the channels of one token begin.
struct NormPlace {
  const uint16_t* x;
  const uint16_t* gate;
  uint16_t* out;

  __device__ __forceinline__ NormPlace(const GatedNormParams& p, int64_t place) {
    int64_t row = place, token = 0;
    if (p.tokens > 1) {
      row = place / p.tokens;
      token = place - row * p.tokens;
    }
    x = static_cast<const uint16_t*>(p.x) + row * p.xRowStride + token * p.xTokenStride;
    gate = static_cast<const uint16_t*>(p.gate) + row * p.gateRowStride + token * p.gateTokenStride;
    out = static_cast<uint16_t*>(p.out) + row * p.outRowStride + token * p.outTokenStride;
  }
};

// Over a team of kLanes lanes; teams wider than a warp are whole blocks and add their warps' sums in order.
template <int kLanes, int kPlaces>
__device__ __forceinline__ void teamSums(float (&sums)[kPlaces]) {
  constexpr int kWidth = kLanes < 32 ? kLanes : 32;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
#pragma unroll
    for (int step = kWidth / 2; step > 0; step /= 2) {
      sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step, kWidth);
    }
  }
  if constexpr (kLanes > 32) {
    __shared__ float shared[kPlaces][kLanes / 32];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (threadIdx.x % 32 == 0) shared[i][threadIdx.x / 32] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      sums[i] = shared[i][0];
#pragma unroll
      for (int warp = 1; warp < kLanes / 32; ++warp) sums[i] += shared[i][warp];
    }
  }
}

constexpr __host__ __device__ int normThreads(int lanes) { return lanes < kMinNormThreads ? kMinNormThreads : lanes; }

// Groups of up to kLanes * 8 channels. Blocks: runs of kPlaces tokens along x, groups along y.
template <class Act, int kLanes, int kPlaces>
__global__ void __launch_bounds__(normThreads(kLanes)) gatedNormKernel(const __grid_constant__ GatedNormParams p) {
  constexpr int kTeams = normThreads(kLanes) / kLanes;
  using Word = Packed<kNormVector>;
  const int group = static_cast<int>(blockIdx.y) * kTeams + static_cast<int>(threadIdx.x) / kLanes;
  const int own = static_cast<int>(threadIdx.x) % kLanes * kNormVector;  // channel within the group
  const bool inside = own < p.size && group < p.groups;  // idle lanes stay for the sums
  const int channel = group * p.size + own;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPlaces;
  releaseDependents();
  float weight[kNormVector];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float4 four{};
    if (inside) four = reinterpret_cast<const float4*>(p.weight + (p.gateFirst ? channel : own))[i];
    weight[4 * i] = four.x;
    weight[4 * i + 1] = four.y;
    weight[4 * i + 2] = four.z;
    weight[4 * i + 3] = four.w;
  }
  waitForPredecessor();
  Word xs[kPlaces], gates[kPlaces];
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const bool wanted = inside && first + i < p.places;
    const NormPlace at(p, wanted ? first + i : first);
    xs[i] = loadIf(wanted, reinterpret_cast<const Word*>(at.x + channel));
    gates[i] = loadIf(wanted, reinterpret_cast<const Word*>(at.gate + channel));
  }
  float x[kPlaces][kNormVector], sums[kPlaces];
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    float opening[kNormVector];
    unpack<Act>(xs[i], x[i]);
    unpack<Act>(gates[i], opening);
    sums[i] = 0.0f;
#pragma unroll
    for (int v = 0; v < kNormVector; ++v) {
      if (p.gateFirst) x[i][v] *= siluFast(opening[v]);
      sums[i] = fmaf(x[i][v], x[i][v], sums[i]);
    }
  }
  teamSums<kLanes, kPlaces>(sums);
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    if (!inside || first + i >= p.places) break;
    const float scale = rsqrtf(sums[i] / static_cast<float>(p.size) + p.eps);
    float opening[kNormVector];
    unpack<Act>(gates[i], opening);
#pragma unroll
    for (int v = 0; v < kNormVector; ++v) {
      x[i][v] = x[i][v] * scale * weight[v];
      if (!p.gateFirst) x[i][v] *= siluFast(opening[v]);
    }
    *reinterpret_cast<Word*>(NormPlace(p, first + i).out + channel) = pack<Act>(x[i]);
  }
}

// Groups of any size and alignment: one warp a group, single channels, inputs read twice.
template <class Act>
__global__ void __launch_bounds__(kMinNormThreads) anyGatedNormKernel(const __grid_constant__ GatedNormParams p) {
  using A = Activation<Act>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = static_cast<int>(blockIdx.y) * (kMinNormThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  releaseDependents();
  waitForPredecessor();
  if (group >= p.groups) return;
  const NormPlace at(p, blockIdx.x);
  const int first = group * p.size;
  float sums[1] = {0.0f};
  for (int channel = lane; channel < p.size; channel += 32) {
    float x = A::toFloat(at.x[first + channel]);
    if (p.gateFirst) x *= siluFast(A::toFloat(at.gate[first + channel]));
    sums[0] = fmaf(x, x, sums[0]);
  }
  teamSums<32, 1>(sums);
  const float scale = rsqrtf(sums[0] / static_cast<float>(p.size) + p.eps);
  for (int channel = lane; channel < p.size; channel += 32) {
    const float x = A::toFloat(at.x[first + channel]), opening = siluFast(A::toFloat(at.gate[first + channel]));
    const float weight = p.weight[p.gateFirst ? first + channel : channel];
    at.out[first + channel] = A::fromFloat(p.gateFirst ? x * opening * scale * weight : x * scale * weight * opening);
  }
}

}  // namespace replayssm
