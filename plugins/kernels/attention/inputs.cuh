// What goes into the attention of a step: head norms, rotation, and the write into the KV slots. One warp a head of one
// token, 8 channels a lane.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"
#include "rows.cuh"

namespace replayssm {

constexpr int kHeadVector = 8;
constexpr int kInputWarps = 4;
constexpr int kMaxHeadSize = 32 * kHeadVector;

// One head of q, k or v: where it is read and written, and whether it is normalised and turned.
struct HeadTask {
  const uint16_t* in;
  uint16_t* out;
  const float* weight;  // null: no norm
  bool turns;

  __device__ __forceinline__ HeadTask(const AttentionInputsParams& p, int row, int token, int head) {
    const int64_t slot = p.slot[row];
    const int kvHead = head < p.heads + p.kvHeads ? head - p.heads : head - p.heads - p.kvHeads;
    const int64_t place = ((slot * p.kvHeads + kvHead) * p.depth + p.start[row] + token) * p.size;
    turns = p.half > 0;
    if (head < p.heads) {
      in = static_cast<const uint16_t*>(p.q) + row * p.qRow + token * p.qToken + head * p.qHead;
      out = static_cast<uint16_t*>(p.qOut) + ((static_cast<int64_t>(row) * p.tokens + token) * p.heads + head) * p.size;
      weight = p.qWeight;
    } else if (head < p.heads + p.kvHeads) {
      in = static_cast<const uint16_t*>(p.k) + row * p.kRow + token * p.kToken + kvHead * p.kHead;
      out = static_cast<uint16_t*>(p.keys) + place;
      weight = p.kWeight;
    } else {
      in = static_cast<const uint16_t*>(p.v) + row * p.vRow + token * p.vToken + kvHead * p.vHead;
      out = static_cast<uint16_t*>(p.values) + place;
      weight = nullptr;
      turns = false;
    }
  }
};

__device__ __forceinline__ void loadFloats(const float* at, float (&values)[kHeadVector]) {
#pragma unroll
  for (int i = 0; i < kHeadVector / 4; ++i) {
    const float4 four = reinterpret_cast<const float4*>(at)[i];
    values[4 * i] = four.x;
    values[4 * i + 1] = four.y;
    values[4 * i + 2] = four.z;
    values[4 * i + 3] = four.w;
  }
}

// Channels (i, i + half) turn by the angle of pair i at the token's position. All lanes take part.
__device__ __forceinline__ void turn(const AttentionInputsParams& p, int64_t position, int channel,
                                     float (&x)[kHeadVector]) {
  const bool first = channel < p.half, turned = channel < 2 * p.half;
  const int lane = static_cast<int>(threadIdx.x) % 32, away = p.half / kHeadVector;
  const int partner = turned ? (first ? lane + away : lane - away) : lane;
  float cosine[kHeadVector] = {}, sine[kHeadVector] = {};
  if (turned) {
    const int64_t angle = position * p.half + (first ? channel : channel - p.half);
    loadFloats(p.cosine + angle, cosine);
    loadFloats(p.sine + angle, sine);
  }
#pragma unroll
  for (int v = 0; v < kHeadVector; ++v) {
    const float other = __shfl_sync(0xffffffffu, x[v], partner);
    if (turned) x[v] = x[v] * cosine[v] + (first ? -other : other) * sine[v];
  }
}

// Blocks: heads of q, k and v along x, tokens along y, rows along z.
template <class Act>
__global__ void __launch_bounds__(32 * kInputWarps)
    attentionInputsKernel(const __grid_constant__ AttentionInputsParams p) {
  using Word = Packed<kHeadVector>;
  const int head = static_cast<int>(blockIdx.x) * kInputWarps + static_cast<int>(threadIdx.x) / 32;
  const int token = static_cast<int>(blockIdx.y), row = static_cast<int>(blockIdx.z);
  const int channel = static_cast<int>(threadIdx.x) % 32 * kHeadVector;
  const bool inside = channel < p.size;
  releaseDependents();
  waitForPredecessor();
  if (head >= p.heads + 2 * p.kvHeads || token >= existingTokens(p, row)) return;
  const HeadTask task(p, row, token, head);
  Word word = loadIf(inside, reinterpret_cast<const Word*>(task.in + channel));
  if (task.weight != nullptr || task.turns) {
    float x[kHeadVector];
    unpack<Act>(word, x);
    if (task.weight != nullptr) {
      float square = 0.0f, weight[kHeadVector] = {};
#pragma unroll
      for (int v = 0; v < kHeadVector; ++v) square = fmaf(x[v], x[v], square);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) square += __shfl_xor_sync(0xffffffffu, square, step);
      const float scale = rsqrtf(square / static_cast<float>(p.size) + p.eps);
      if (inside) loadFloats(task.weight + channel, weight);
#pragma unroll
      for (int v = 0; v < kHeadVector; ++v) x[v] = x[v] * scale * (weight[v] + p.weightOffset);
    }
    if (task.turns) turn(p, static_cast<int64_t>(p.start[row]) + token, channel, x);
    word = pack<Act>(x);
  }
  if (inside) *reinterpret_cast<Word*>(task.out + channel) = word;
}

}  // namespace replayssm
