// Depthwise causal convolution with SiLU over a window that rolls back, and the decay inputs, in one grid.
//
// A thread owns kVector channels of up to kTokenTile tokens of a few rows; it alone touches its channels of a row's
// window, so reading the taps and writing the new inputs need no barrier. A token's sum runs over the taps in one fixed
// order whatever the split of the tokens into calls and tiles. A step is a chain of dependent loads (slot, position,
// taps), so a thread loads all its rows before it computes the first.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"

namespace replayssm {

constexpr int kInputThreads = 128;

// A row of the step: its slot, the tokens that exist, the position of the first (of slot 0 where there is none).
struct InputRow {
  int slot, tokens, position;
};

// Rows from `first` on; none where they end. No branches: each row's loads would wait for those of the row before.
template <int kRows>
__device__ __forceinline__ void inputRows(const SsmInputsParams& p, int first, InputRow (&rows)[kRows]) {
  int tokens[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = min(first + r, p.rows - 1);
    rows[r].slot = p.slot[row * p.slotStride];
    tokens[r] = p.numTokens[row * p.numTokensStride];
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Garbage ids and positions must do no harm: engine builders time their candidates with uninitialised inputs.
    const bool live = rows[r].slot >= 0 && rows[r].slot < p.slots && first + r < p.rows;
    rows[r].slot = live ? rows[r].slot : 0;
    rows[r].position = max(p.position[rows[r].slot], 0);
    rows[r].tokens = live ? min(max(tokens[r], 0), p.tokens) : 0;
  }
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

// kStep: tokens loaded at once. kRows: rows loaded at once; kPrompt: a chunk of a prompt, one row.
template <class Act, int kTaps, int kVector, int kStep, int kRows, bool kPrompt>
struct ConvolutionThread {
  using Word = Packed<kVector>;
  static constexpr int kHistory = kTaps - 1;
  static_assert(!kPrompt || kRows == 1, "tiles of a prompt belong to one row");

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
  // Ring row `ahead` (of either sign) rows from `base`, which is within the ring; |ahead| is smaller than the ring.
  __device__ __forceinline__ Word* windowRow(int slot, int base, int ahead) const {
    int ringRow = base + ahead;
    ringRow += ringRow < 0 ? p.ringRows : ringRow >= p.ringRows ? -p.ringRows : 0;
    uint16_t* at = static_cast<uint16_t*>(p.window) + slot * p.windowSlotStride;
    return reinterpret_cast<Word*>(at + static_cast<int64_t>(ringRow) * p.channels + channel);
  }
  __device__ __forceinline__ int ringBase(const InputRow& info) const {
    return static_cast<int>(static_cast<uint32_t>(info.position) % static_cast<uint32_t>(p.ringRows));
  }

  // The inputs before token `first`: from the window, or from the chunk itself behind its first tile.
  __device__ __forceinline__ void loadHistory(const InputRow& info, int row, int base, int first,
                                              Word (&words)[kHistory]) const {
#pragma unroll
    for (int j = 0; j < kHistory; ++j) {
      const int back = kHistory - j;
      const bool wanted = info.tokens > first && back < p.taps;
      if (kPrompt && first > 0) {
        words[j] = loadIf(wanted, input(row, first - back));
      } else {
        words[j] = loadIf(wanted && info.position >= back, windowRow(info.slot, base, -back));
      }
    }
  }

  __device__ __forceinline__ void loadTokens(int row, int token, int end, Word (&words)[kStep]) const {
#pragma unroll
    for (int s = 0; s < kStep; ++s) words[s] = loadIf(token + s < end, input(row, token + s));
  }

  __device__ __forceinline__ Word outputOf(const float (&sequence)[kHistory + kStep][kVector], int s) const {
    float result[kVector];
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      float sum = filter.weight[0][v] * sequence[s][v];
#pragma unroll
      for (int j = 1; j < kTaps; ++j) sum = fmaf(filter.weight[j][v], sequence[s + j][v], sum);
      result[v] = siluFast(sum + filter.bias[v]);
    }
    return pack<Act>(result);
  }

  // Tokens first..end-1 of a row; the inputs before them and the first kStep of them are loaded.
  __device__ __forceinline__ void convolve(const InputRow& info, int row, int base, int first, int end,
                                           const Word (&history)[kHistory], Word (&fresh)[kStep]) const {
    float sequence[kHistory + kStep][kVector];
#pragma unroll
    for (int j = 0; j < kHistory; ++j) unpack<Act>(history[j], sequence[j]);
    if constexpr (kStep == 1) {  // the step has one token
      unpack<Act>(fresh[0], sequence[kHistory]);
      *output(row, 0) = outputOf(sequence, 0);
      *windowRow(info.slot, base, 0) = fresh[0];
    } else {
#pragma unroll 1
      for (int token = first; token < end; token += kStep) {
        if (token > first) loadTokens(row, token, end, fresh);
#pragma unroll
        for (int s = 0; s < kStep; ++s) unpack<Act>(fresh[s], sequence[kHistory + s]);
#pragma unroll
        for (int s = 0; s < kStep; ++s) {
          if (token + s >= end) break;
          *output(row, token + s) = outputOf(sequence, s);
          if (!kPrompt) *windowRow(info.slot, base, token + s) = fresh[s];
        }
#pragma unroll
        for (int j = 0; j < kHistory; ++j) {
#pragma unroll
          for (int v = 0; v < kVector; ++v) sequence[j][v] = sequence[j + kStep][v];
        }
      }
    }
  }

  // The newest inputs of a chunk into the window.
  __device__ __forceinline__ void keepPrompt(const InputRow& info, int row) const {
    const int oldest = max(info.tokens - p.ringRows, 0);
    int ringRow = static_cast<int>((static_cast<uint32_t>(info.position) + static_cast<uint32_t>(oldest)) %
                                   static_cast<uint32_t>(p.ringRows));
#pragma unroll 4
    for (int token = oldest; token < info.tokens; ++token) {
      *windowRow(info.slot, ringRow, 0) = *input(row, token);
      if (++ringRow == p.ringRows) ringRow = 0;
    }
  }

  // Rows firstRow.. of the step, or the tile of tokens from `first` on of one row of a prompt.
  __device__ __forceinline__ void run(int firstRow, int first) const {
    const int last = min(first + kTokenTile, p.tokens);
    InputRow info[kRows];
    int base[kRows];
    Word history[kRows][kHistory], fresh[kRows][kStep];
    inputRows(p, firstRow, info);
#pragma unroll
    for (int r = 0; r < kRows; ++r) loadTokens(firstRow + r, first, min(last, info[r].tokens), fresh[r]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      base[r] = ringBase(info[r]);
      loadHistory(info[r], firstRow + r, base[r], first, history[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = firstRow + r;
      if (row >= p.rows) break;
      const int end = min(last, info[r].tokens);
      if (end > first) convolve(info[r], row, base[r], first, end, history[r], fresh[r]);
#pragma unroll 1
      for (int token = max(end, first); token < last; ++token) *output(row, token) = Word{};
      // HAZARD: the first tile alone reads the window, so it alone may write it, and only now.
      if (kPrompt && first == 0) keepPrompt(info[r], row);
    }
  }
};

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

template <class Act>
__device__ __forceinline__ float activationIf(bool wanted, const ActTensor& tensor, int row, int token, int channel) {
  const uint16_t* at = static_cast<const uint16_t*>(tensor.data);
  return Activation<Act>::toFloat(loadIf(wanted, at + row * tensor.rowStride + token * tensor.tokenStride + channel));
}

// Decay inputs of one head and token of kRows rows, zero where the token does not exist.
template <class Act, int kRows>
__device__ __forceinline__ void decayInputs(const SsmInputsParams& p, int firstRow, int token, int head, float bias,
                                            float rate) {
  const bool gdn = p.decay == DecayKind::kGdn;
  InputRow info[kRows];
  float decay[kRows], beta[kRows];
  inputRows(p, firstRow, info);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    decay[r] = activationIf<Act>(token < info[r].tokens, p.decayIn, firstRow + r, token, head);
    beta[r] = activationIf<Act>(gdn && token < info[r].tokens, p.betaIn, firstRow + r, token, head);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (firstRow + r >= p.rows) break;
    const int64_t at = (static_cast<int64_t>(firstRow + r) * p.tokens + token) * p.heads + head;
    const bool live = token < info[r].tokens;
    const float raised = softplus(decay[r] + bias);
    // comparisons keep a NaN, fminf and fmaxf do not
    const float bounded = raised < p.dtLow ? p.dtLow : raised > p.dtHigh ? p.dtHigh : raised;
    p.decayOut[at] = !live ? 0.0f : gdn ? rate * raised : bounded;
    if (gdn) p.betaOut[at] = live ? 1.0f / (1.0f + expf(-beta[r])) : 0.0f;
  }
}

// Blocks: channels, then heads times the tokens of a tile, along x; tiles of tokens along y; kRows rows each along z.
template <class Act, int kTaps, int kVector, int kStep, int kRows, bool kPrompt>
__global__ void __launch_bounds__(kInputThreads, kTaps == 4 ? 5 : 4)
    ssmInputsKernel(const __grid_constant__ SsmInputsParams p) {
  const int first = static_cast<int>(blockIdx.y) * kTokenTile;
  const int firstRow = static_cast<int>(blockIdx.z) * kRows;
  const int block = static_cast<int>(blockIdx.x);
  releaseDependents();
  if (block < p.channelBlocks) {
    const int channel = (block * kInputThreads + static_cast<int>(threadIdx.x)) * kVector;
    if (channel >= p.channels) return;
    const ConvolutionThread<Act, kTaps, kVector, kStep, kRows, kPrompt> thread(p, channel);
    waitForPredecessor();
    thread.run(firstRow, first);
    return;
  }
  const uint32_t index = static_cast<uint32_t>(block - p.channelBlocks) * kInputThreads + threadIdx.x;
  const int offset = static_cast<int>(index / static_cast<uint32_t>(p.heads));
  const int head = static_cast<int>(index % static_cast<uint32_t>(p.heads));
  if (first + offset >= min(first + kTokenTile, p.tokens)) return;
  const float bias = p.dtBias[head];
  const float rate = p.decay == DecayKind::kGdn ? -expf(p.aLog[head]) : 0.0f;
  waitForPredecessor();
  decayInputs<Act, kRows>(p, firstRow, first + offset, head, bias, rate);
}

}  // namespace replayssm
