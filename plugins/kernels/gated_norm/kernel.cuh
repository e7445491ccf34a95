// Group RMSNorm with a SiLU gate. A team of lanes owns a group of channels, 8 channels a lane, of one token or of several
// one after the other. The order of a sum depends on the group's size alone, so a token's bits do not depend on the
// batch.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/row_sum.cuh"
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

// Of a multiprocessor: threads that fill it, with registers for what is on its way.
constexpr __host__ __device__ int normBlocks(int lanes) { return lanes <= 128 ? 8 : 4; }
constexpr __host__ __device__ int normThreads(int lanes) { return lanes < kMinNormThreads ? kMinNormThreads : lanes; }

// What a lane reads of a token.
struct NormWords {
  Packed<kNormVector> x, gate;

  // None behind the last token, nor of a channel that is not inside.
  __device__ __forceinline__ void load(const GatedNormParams& p, int64_t place, bool inside, int channel) {
    using Word = Packed<kNormVector>;
    const bool wanted = inside && place < p.places;
    const NormPlace at(p, wanted ? place : 0);
    x = loadIf(wanted, reinterpret_cast<const Word*>(at.x + channel));
    gate = loadIf(wanted, reinterpret_cast<const Word*>(at.gate + channel));
  }
};

// Groups of up to kLanes * 8 channels. Blocks: tokens along x, of which a block has several where there are many, the next
// one on its way while one is computed; groups along y.
template <class Act, int kLanes>
__global__ void __launch_bounds__(normThreads(kLanes), normBlocks(kLanes))
    gatedNormKernel(const __grid_constant__ GatedNormParams p) {
  constexpr int kTeams = normThreads(kLanes) / kLanes;
  using Word = Packed<kNormVector>;
  const int group = static_cast<int>(blockIdx.y) * kTeams + static_cast<int>(threadIdx.x) / kLanes;
  const int own = static_cast<int>(threadIdx.x) % kLanes * kNormVector;  // channel within the group
  const bool inside = own < p.size && group < p.groups;  // idle lanes stay for the sums
  const int channel = group * p.size + own;
  releaseDependents();
  float weight[kNormVector] = {};
  if (inside) normWeight(weight, p.weight + (p.gateFirst ? channel : own), 0.0f);
  waitForPredecessor();
  int64_t place = blockIdx.x;
  NormWords words;
  words.load(p, place, inside, channel);
#pragma unroll 1
  for (int turn = 0; place < p.places; ++turn, place += gridDim.x) {
    const NormWords token = words;
    words.load(p, place + gridDim.x, inside, channel);
    float x[kNormVector], opening[kNormVector], sums[1] = {0.0f};
    unpack<Act>(token.x, x);
    unpack<Act>(token.gate, opening);
#pragma unroll
    for (int v = 0; v < kNormVector; ++v) {
      opening[v] = siluFast(opening[v]);
      if (p.gateFirst) x[v] *= opening[v];
      sums[0] = fmaf(x[v], x[v], sums[0]);
    }
    teamSums<kLanes, 1>(sums, turn);
    const float scale = rsqrtf(sums[0] / static_cast<float>(p.size) + p.eps);
#pragma unroll
    for (int v = 0; v < kNormVector; ++v) {
      x[v] = x[v] * scale * weight[v];
      if (!p.gateFirst) x[v] *= opening[v];
    }
    if (inside) *reinterpret_cast<Word*>(NormPlace(p, place).out + channel) = pack<Act>(x);
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
