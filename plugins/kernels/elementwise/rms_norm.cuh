// RMSNorm of whole rows with the residual sum before it. One block a row; the order of a sum depends on the row's size
// alone, so a row's bits do not depend on the batch.
#pragma once

#include "kernels/common/programmatic.cuh"
#include "kernels/common/row_sum.cuh"
#include "kernels/common/vector.cuh"
#include "params.h"

namespace replayssm {

constexpr int kRowVector = 8;  // channels of one access
constexpr int kMaxRowThreads = 1024;

// Parts of a product: how many are on their way at once.
constexpr int kPartsAhead = 4;

// The sum of the parts at `at` and every `stride` floats behind it, in their order; eight channels.
__device__ __forceinline__ void addParts(float (&x)[kRowVector], bool inside, const float* at, int parts,
                                         int64_t stride) {
#pragma unroll 1
  for (int first = 0; first < parts; first += kPartsAhead) {
    uint4 words[kPartsAhead][2];
#pragma unroll
    for (int i = 0; i < kPartsAhead; ++i) {
      const auto* part = reinterpret_cast<const uint4*>(at + (first + i) * stride);
      words[i][0] = loadIf(inside && first + i < parts, part);
      words[i][1] = loadIf(inside && first + i < parts, part + 1);
    }
#pragma unroll
    for (int i = 0; i < kPartsAhead; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        x[4 * half] += __uint_as_float(words[i][half].x);
        x[4 * half + 1] += __uint_as_float(words[i][half].y);
        x[4 * half + 2] += __uint_as_float(words[i][half].z);
        x[4 * half + 3] += __uint_as_float(words[i][half].w);
      }
    }
  }
}

// Rows of up to kMaxRowThreads * 8 channels that are the float32 parts of a product, with a residual: 8 channels a thread,
// held in registers between the two uses.
template <class Act>
__global__ void __launch_bounds__(kMaxRowThreads) partsRmsNormKernel(const __grid_constant__ RmsNormParams p) {
  using Word = Packed<kRowVector>;
  __shared__ float shared[kMaxRowThreads / 32];
  const int channel = static_cast<int>(threadIdx.x) * kRowVector;
  const bool inside = channel < p.size;
  const int64_t row = blockIdx.x;
  releaseDependents();
  float weight[kRowVector] = {};
  if (inside) normWeight(weight, p.weight + channel, p.weightOffset);
  waitForPredecessor();
  const auto at = [&](const void* base, int64_t stride) {
    return reinterpret_cast<const Word*>(static_cast<const uint16_t*>(base) + row * stride + channel);
  };
  const Word other = loadIf(inside, at(p.residual, p.residualStride));
  float x[kRowVector] = {}, r[kRowVector];
  addParts(x, inside, static_cast<const float*>(p.x) + row * p.xStride + channel, p.parts, p.partStride);
  unpack<Act>(other, r);
#pragma unroll
  for (int v = 0; v < kRowVector; ++v) x[v] += r[v];
  const Word word = pack<Act>(x);
  if (inside) *const_cast<Word*>(at(p.sum, p.sumStride)) = word;
  unpack<Act>(word, x);
  float square = 0.0f;
#pragma unroll
  for (int v = 0; v < kRowVector; ++v) square = fmaf(x[v], x[v], square);
  const float scale = rsqrtf(blockSum(square, shared) / static_cast<float>(p.size) + p.eps);
#pragma unroll
  for (int v = 0; v < kRowVector; ++v) x[v] = x[v] * scale * weight[v];
  if (inside) *const_cast<Word*>(at(p.out, p.outStride)) = pack<Act>(x);
}

constexpr int kRowWords = 4;  // of a thread: small blocks, all of which run at once when there are a thousand rows

// Rows of up to kMaxRowThreads * 8 channels, kRowWords times 8 a thread. Weights come last, from the L1: in registers they
// would take the room of other blocks.
template <class Act>
__global__ void __launch_bounds__(kMaxRowThreads / kRowWords, 4)
    rmsNormKernel(const __grid_constant__ RmsNormParams p) {
  using Word = Packed<kRowVector>;
  __shared__ float shared[kMaxRowThreads / kRowWords / 32];
  const int first = static_cast<int>(threadIdx.x) * kRowVector, step = static_cast<int>(blockDim.x) * kRowVector;
  const bool adds = p.residual != nullptr;
  const int64_t row = blockIdx.x;
  releaseDependents();
  waitForPredecessor();
  const auto at = [&](const void* base, int64_t stride, int i) {
    return reinterpret_cast<const Word*>(static_cast<const uint16_t*>(base) + row * stride + first + i * step);
  };
  // all at once: a branch around one would make it wait for the one before
  Word words[kRowWords], others[kRowWords];
#pragma unroll
  for (int i = 0; i < kRowWords; ++i) {
    const bool inside = first + i * step < p.size;
    words[i] = loadIf(inside, at(p.x, p.xStride, i));
    others[i] = loadIf(inside && adds, at(p.residual, p.residualStride, i));
  }
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowWords; ++i) {
    float x[kRowVector], r[kRowVector];
    if (adds) {
      unpack<Act>(words[i], x);
      unpack<Act>(others[i], r);
#pragma unroll
      for (int v = 0; v < kRowVector; ++v) x[v] += r[v];
      words[i] = pack<Act>(x);
      if (first + i * step < p.size) storeWord(const_cast<Word*>(at(p.sum, p.sumStride, i)), words[i]);
    }
    unpack<Act>(words[i], x);
#pragma unroll
    for (int v = 0; v < kRowVector; ++v) square = fmaf(x[v], x[v], square);
  }
  const float scale = rsqrtf(blockSum(square, shared) / static_cast<float>(p.size) + p.eps);
#pragma unroll
  for (int i = 0; i < kRowWords; ++i) {
    if (first + i * step >= p.size) break;
    float x[kRowVector], weight[kRowVector];
    unpack<Act>(words[i], x);
    normWeight(weight, p.weight + first + i * step, p.weightOffset);
#pragma unroll
    for (int v = 0; v < kRowVector; ++v) x[v] = x[v] * scale * weight[v];
    storeWord(const_cast<Word*>(at(p.out, p.outStride, i)), pack<Act>(x));
  }
}

// Rows of any size and alignment: single channels, read twice. kParts: as above.
template <class Act, bool kParts>
__global__ void __launch_bounds__(256) anyRmsNormKernel(const __grid_constant__ RmsNormParams p) {
  using A = Activation<Act>;
  __shared__ float shared[8];
  const int64_t row = blockIdx.x;
  const auto* x = static_cast<const uint16_t*>(p.x) + row * p.xStride;
  const auto* parts = static_cast<const float*>(p.x) + row * p.xStride;
  const auto* residual = static_cast<const uint16_t*>(p.residual) + row * p.residualStride;
  auto* sum = static_cast<uint16_t*>(p.sum) + row * p.sumStride;
  auto* out = static_cast<uint16_t*>(p.out) + row * p.outStride;
  releaseDependents();
  waitForPredecessor();
  const bool adds = p.residual != nullptr;
  float square = 0.0f;
  for (int channel = static_cast<int>(threadIdx.x); channel < p.size; channel += 256) {
    float value = kParts ? 0.0f : A::toFloat(x[channel]);
    for (int i = 0; kParts && i < p.parts; ++i) value += parts[i * p.partStride + channel];
    if (adds) {
      sum[channel] = A::fromFloat(value + A::toFloat(residual[channel]));
      value = A::toFloat(sum[channel]);
    }
    square = fmaf(value, value, square);
  }
  const float scale = rsqrtf(blockSum(square, shared) / static_cast<float>(p.size) + p.eps);
  for (int channel = static_cast<int>(threadIdx.x); channel < p.size; channel += 256) {
    const float value = A::toFloat(adds ? sum[channel] : x[channel]);
    out[channel] = A::fromFloat(value * scale * (p.weight[channel] + p.weightOffset));
  }
}

}  // namespace replayssm
