// What goes into the attention of a step: head norms, rotation, and the write into the KV slots. A team of lanes has some
// tokens of one head, 8 channels a lane, and loads them all at once: the loads stand behind each other otherwise.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/row_sum.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"
#include "rows.cuh"

namespace replayssm {

constexpr int kHeadVector = 8;
constexpr int kInputThreads = 128;

// One head of q, k or v: where its first token is read and written, and how far the next one is.
struct HeadTask {
  const uint16_t* in;
  uint16_t* out;
  int64_t inToken, outToken;

  __device__ __forceinline__ HeadTask(const AttentionInputsParams& p, int row, int token, int head) {
    const int64_t slot = p.slot[row];
    const int kvHead = head < p.heads + p.kvHeads ? head - p.heads : head - p.heads - p.kvHeads;
    const int64_t place = ((slot * p.kvHeads + kvHead) * p.depth + p.start[row] + token) * p.size;
    outToken = p.size;
    if (head < p.heads) {
      in = static_cast<const uint16_t*>(p.q) + row * p.qRow + token * p.qToken + head * p.qHead;
      inToken = p.qToken;
      out = static_cast<uint16_t*>(p.qOut) + ((static_cast<int64_t>(row) * p.tokens + token) * p.heads + head) * p.size;
      outToken *= p.heads;
    } else if (head < p.heads + p.kvHeads) {
      in = static_cast<const uint16_t*>(p.k) + row * p.kRow + token * p.kToken + kvHead * p.kHead;
      inToken = p.kToken;
      out = static_cast<uint16_t*>(p.keys) + place;
    } else {
      in = static_cast<const uint16_t*>(p.v) + row * p.vRow + token * p.vToken + kvHead * p.vHead;
      inToken = p.vToken;
      out = static_cast<uint16_t*>(p.values) + place;
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

// The angles of a lane's channels at a position; channels (i, i + half) turn together, by that of pair i.
struct LaneAngles {
  float cosine[kHeadVector] = {}, sine[kHeadVector] = {};

  __device__ __forceinline__ void load(const AttentionInputsParams& p, bool turned, int64_t position, int channel) {
    if (!turned) return;
    const int64_t angle = position * p.half + (channel < p.half ? channel : channel - p.half);
    loadFloats(p.cosine + angle, cosine);
    loadFloats(p.sine + angle, sine);
  }

  // All lanes take part; turned: this one's channels are.
  __device__ __forceinline__ void turn(const AttentionInputsParams& p, bool turned, int channel,
                                       float (&x)[kHeadVector]) const {
    const bool first = channel < p.half;
    const int lane = static_cast<int>(threadIdx.x) % 32, away = p.half / kHeadVector;
    const int partner = turned ? (first ? lane + away : lane - away) : lane;
#pragma unroll
    for (int v = 0; v < kHeadVector; ++v) {
      const float other = __shfl_sync(0xffffffffu, x[v], partner);
      if (turned) x[v] = x[v] * cosine[v] + (first ? -other : other) * sine[v];
    }
  }
};

// Heads of up to 8 kLanes channels. Blocks: heads of q, k and v along x, runs of kTokens tokens along y, rows along z.
// kTurns: there is a rotation.
template <class Act, int kLanes, int kTokens, bool kTurns>
__global__ void __launch_bounds__(kInputThreads)
    attentionInputsKernel(const __grid_constant__ AttentionInputsParams p) {
  using Word = Packed<kHeadVector>;
  constexpr int kTeams = kInputThreads / kLanes;
  const int all = p.heads + 2 * p.kvHeads, own = static_cast<int>(blockIdx.x) * kTeams + threadIdx.x / kLanes;
  const int head = min(own, all - 1), first = static_cast<int>(blockIdx.y) * kTokens;
  const int row = static_cast<int>(blockIdx.z), channel = static_cast<int>(threadIdx.x) % kLanes * kHeadVector;
  const bool inside = own < all && channel < p.size;  // idle lanes stay for the sums
  const bool query = head < p.heads, norms = p.qWeight != nullptr;
  releaseDependents();
  float weight[kHeadVector] = {};
  if (norms && inside) loadFloats((query ? p.qWeight : p.kWeight) + channel, weight);
  waitForPredecessor();
  const int end = existingTokens(p, row);
  if (first >= end) return;
  const HeadTask task(p, row, first, head);
  Word words[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    words[t] = loadIf(inside && first + t < end, reinterpret_cast<const Word*>(task.in + t * task.inToken + channel));
  }
  if (norms || kTurns) {
    const bool value = head >= p.heads + p.kvHeads, turned = kTurns && !value && channel < 2 * p.half;
    LaneAngles angles[kTurns ? kTokens : 1];
    float x[kTokens][kHeadVector], squares[kTokens] = {};
#pragma unroll
    for (int t = 0; kTurns && t < kTokens; ++t) {
      angles[t].load(p, turned, static_cast<int64_t>(p.start[row]) + min(first + t, end - 1), channel);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      unpack<Act>(words[t], x[t]);
#pragma unroll
      for (int v = 0; v < kHeadVector; ++v) squares[t] = fmaf(x[t][v], x[t][v], squares[t]);
    }
    if (norms) teamSums<kLanes, kTokens>(squares);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (norms) {
        const float scale = rsqrtf(squares[t] / static_cast<float>(p.size) + p.eps);
#pragma unroll
        for (int v = 0; v < kHeadVector; ++v) x[t][v] = x[t][v] * scale * (weight[v] + p.weightOffset);
      }
      if constexpr (kTurns) angles[t].turn(p, turned, channel, x[t]);
      if (!value) words[t] = pack<Act>(x[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (inside && first + t < end) *reinterpret_cast<Word*>(task.out + t * task.outToken + channel) = words[t];
  }
}

}  // namespace replayssm
