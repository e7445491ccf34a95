// Depthwise causal convolution with SiLU over a window that rolls back, and the decay inputs, in one grid.
//
// A thread owns kVector channels of up to kTokenTile tokens of a few rows; it alone touches its channels of a row's
// window, so reading the taps and writing the new inputs need no barrier. A token's sum runs over the taps in one fixed
// order whatever the split of the tokens into calls and tiles.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"

namespace replayssm {

constexpr int kInputThreads = 128;
constexpr int kTokenStep = 4;  // tokens loaded at once

// A row of the step: its slot, the tokens that exist, the position of the first.
struct InputRow {
  int slot, tokens, position;
};

__device__ __forceinline__ InputRow inputRow(const SsmInputsParams& p, int row) {
  int slot = p.slot[row * p.slotStride];
  int tokens = slot < 0 ? 0 : min(max(p.numTokens[row * p.numTokensStride], 0), p.tokens);
  return {slot, tokens, tokens > 0 ? p.position[slot] : 0};
}

// Taps of kVector channels, the oldest first; taps the kernel holds beyond the model's are zero.
template <int kTaps, int kVector>
struct Filter {
  float weight[kTaps][kVector];
  float bias[kVector];

  __device__ __forceinline__ Filter(const SsmInputsParams& p, int channel) {
    if (kTaps == 4 && kVector == 4 && p.taps == 4) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        const float4 taps = reinterpret_cast<const float4*>(p.weight)[channel + v];
        weight[0][v] = taps.x;
        weight[1][v] = taps.y;
        weight[2][v] = taps.z;
        weight[3][v] = taps.w;
        bias[v] = p.bias == nullptr ? 0.0f : p.bias[channel + v];
      }
      return;
    }
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const float* taps = p.weight + static_cast<int64_t>(channel + v) * p.taps - (kTaps - p.taps);
#pragma unroll
      for (int j = 0; j < kTaps; ++j) weight[j][v] = j >= kTaps - p.taps ? taps[j] : 0.0f;
      bias[v] = p.bias == nullptr ? 0.0f : p.bias[channel + v];
    }
  }
};

template <class Act, int kTaps, int kVector, bool kPrompt>
struct ConvolutionThread {
  using Word = Packed<kVector>;
  static constexpr int kHistory = kTaps - 1;

  const SsmInputsParams& p;
  const int channel;
  const Filter<kTaps, kVector> filter;

  __device__ __forceinline__ ConvolutionThread(const SsmInputsParams& params, int c)
      : p(params), channel(c), filter(params, c) {}

  __device__ __forceinline__ const Word* input(int row, int token) const {
    const uint16_t* at = static_cast<const uint16_t*>(p.x.data) + row * p.x.rowStride + token * p.x.tokenStride;
    return reinterpret_cast<const Word*>(at + channel);
  }
  __device__ __forceinline__ Word* output(int row, int token) const {
    uint16_t* at = static_cast<uint16_t*>(p.out) + row * p.outRowStride + token * p.outTokenStride;
    return reinterpret_cast<Word*>(at + channel);
  }
  __device__ __forceinline__ Word* windowRow(int slot, int ringRow) const {
    uint16_t* at = static_cast<uint16_t*>(p.window) + slot * p.windowSlotStride;
    return reinterpret_cast<Word*>(at + static_cast<int64_t>(ringRow) * p.channels + channel);
  }

  // The inputs before token `first`: from the window, or from the chunk itself behind its first tile.
  __device__ __forceinline__ void history(const InputRow& info, int row, int first,
                                          float (&sequence)[kHistory + kTokenStep][kVector]) const {
#pragma unroll
    for (int j = 0; j < kHistory; ++j) {
      Word word{};
      const int back = kHistory - j;
      if (back < p.taps) {
        if (first > 0) {
          word = *input(row, first - back);
        } else if (info.position >= back) {
          word = *windowRow(info.slot, (info.position - back) % p.ringRows);
        }
      }
      unpack<Act>(word, sequence[j]);
    }
  }

  // Tokens first..end-1 of a row that exist.
  __device__ __forceinline__ void convolve(const InputRow& info, int row, int first, int end) const {
    float sequence[kHistory + kTokenStep][kVector];
    history(info, row, first, sequence);
#pragma unroll 1
    for (int token = first; token < end; token += kTokenStep) {
      Word fresh[kTokenStep];
#pragma unroll
      for (int s = 0; s < kTokenStep; ++s) fresh[s] = token + s < end ? *input(row, token + s) : Word{};
#pragma unroll
      for (int s = 0; s < kTokenStep; ++s) unpack<Act>(fresh[s], sequence[kHistory + s]);
#pragma unroll
      for (int s = 0; s < kTokenStep; ++s) {
        if (token + s >= end) break;
        float result[kVector];
#pragma unroll
        for (int v = 0; v < kVector; ++v) {
          float sum = filter.weight[0][v] * sequence[s][v];
#pragma unroll
          for (int j = 1; j < kTaps; ++j) sum = fmaf(filter.weight[j][v], sequence[s + j][v], sum);
          result[v] = siluFast(sum + filter.bias[v]);
        }
        *output(row, token + s) = pack<Act>(result);
        if (!kPrompt) *windowRow(info.slot, (info.position + token + s) % p.ringRows) = fresh[s];
      }
#pragma unroll
      for (int j = 0; j < kHistory; ++j) {
#pragma unroll
        for (int v = 0; v < kVector; ++v) sequence[j][v] = sequence[j + kTokenStep][v];
      }
    }
  }

  __device__ __forceinline__ void run(const InputRow& info, int row, int first) const {
    const int last = min(first + kTokenTile, p.tokens);
    const int end = min(last, info.tokens);
    if (end > first) convolve(info, row, first, end);
    for (int token = max(end, first); token < last; ++token) *output(row, token) = Word{};
    if (kPrompt && first == 0) {
      // HAZARD: the first tile alone reads the window, so it alone may write it, and only now.
      for (int token = max(info.tokens - p.ringRows, 0); token < info.tokens; ++token) {
        *windowRow(info.slot, (info.position + token) % p.ringRows) = *input(row, token);
      }
    }
  }
};

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

template <class Act>
__device__ __forceinline__ float activationAt(const ActTensor& tensor, int row, int token, int channel) {
  const uint16_t* at = static_cast<const uint16_t*>(tensor.data);
  return Activation<Act>::toFloat(at[row * tensor.rowStride + token * tensor.tokenStride + channel]);
}

// Decay inputs of one head: the tokens of a tile of a row, zero where there is none.
template <class Act>
__device__ __forceinline__ void decayInputs(const SsmInputsParams& p, const InputRow& info, int row, int first,
                                            int head, float bias, float rate) {
  const int last = min(first + kTokenTile, p.tokens);
#pragma unroll 4
  for (int token = first; token < last; ++token) {
    float decay = 0.0f, beta = 0.0f;
    if (token < info.tokens) {
      const float raised = softplus(activationAt<Act>(p.decayIn, row, token, head) + bias);
      if (p.decay == DecayKind::kMamba2) {
        decay = fminf(fmaxf(raised, p.dtLow), p.dtHigh);
      } else {
        decay = rate * raised;
        beta = 1.0f / (1.0f + expf(-activationAt<Act>(p.betaIn, row, token, head)));
      }
    }
    const int64_t at = (static_cast<int64_t>(row) * p.tokens + token) * p.heads + head;
    p.decayOut[at] = decay;
    if (p.decay == DecayKind::kGdn) p.betaOut[at] = beta;
  }
}

// Blocks: channels, then heads, along x; tiles of tokens along y; runs of rowsPerThread rows along z.
template <class Act, int kTaps, int kVector, bool kPrompt>
__global__ void __launch_bounds__(kInputThreads, kTaps == 4 ? 7 : 4) ssmInputsKernel(const __grid_constant__ SsmInputsParams p) {
  const int first = static_cast<int>(blockIdx.y) * kTokenTile;
  const int firstRow = static_cast<int>(blockIdx.z) * p.rowsPerThread;
  const int lastRow = min(firstRow + p.rowsPerThread, p.rows);
  releaseDependents();
  if (static_cast<int>(blockIdx.x) < p.channelBlocks) {
    const int channel = (static_cast<int>(blockIdx.x) * kInputThreads + static_cast<int>(threadIdx.x)) * kVector;
    if (channel >= p.channels) return;
    const ConvolutionThread<Act, kTaps, kVector, kPrompt> thread(p, channel);
    waitForPredecessor();
    for (int row = firstRow; row < lastRow; ++row) thread.run(inputRow(p, row), row, first);
    return;
  }
  const int head = (static_cast<int>(blockIdx.x) - p.channelBlocks) * kInputThreads + static_cast<int>(threadIdx.x);
  if (head >= p.heads) return;
  const float bias = p.dtBias[head];
  const float rate = p.decay == DecayKind::kGdn ? -expf(p.aLog[head]) : 0.0f;
  waitForPredecessor();
  for (int row = firstRow; row < lastRow; ++row) decayInputs<Act>(p, inputRow(p, row), row, first, head, bias, rate);
}

}  // namespace replayssm
