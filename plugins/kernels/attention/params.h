// Attention over the KV slots as the ABI layer sees it: plain data, checked there; strides in elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace replayssm {

struct AttentionInputsParams {
  int32_t rows, tokens, heads, kvHeads, size, slots, depth;
  int32_t half;  // R; 0 where nothing turns
  float eps, weightOffset;
  bool float16;  // activations; else bfloat16
  bool programmaticLaunch;

  const int32_t* slot;
  const int32_t* start;
  const int32_t* numTokens;
  const void* q;
  const void* k;
  const void* v;
  int64_t qRow, qToken, qHead, kRow, kToken, kHead, vRow, vToken, vHead;
  const float* qWeight;  // null: no norm
  const float* kWeight;
  const float* cosine;
  const float* sine;
  void* qOut;
  void* keys;
  void* values;
};

struct AttentionParams {
  int32_t rows, tokens, heads, kvHeads, size, slots, depth;
  float scale;  // of the scores, times log2(e)
  bool float16;
  bool programmaticLaunch;

  const int32_t* slot;
  const int32_t* start;
  const int32_t* numTokens;
  const void* q;
  const void* keys;
  const void* values;
  void* out;
  int32_t multiprocessors;
  int32_t splits;     // of the keys; 1: no workspace
  float* partial;     // [B, Hkv, splits, T * group, D]: sums relative to the split's own maximum
  float2* statistic;  // [B, Hkv, splits, T * group]: maximum (scaled) and sum of weights
};

// Whether the instructions of a warpgroup (sm_90a) are part of this build.
#if defined(RSSM_WARPGROUP)
constexpr bool kWideBuilt = true;
#else
constexpr bool kWideBuilt = false;
#endif

// Into how many parts the keys of a row are cut: a function of the shapes alone.
int attentionSplits(const AttentionParams& p);

cudaError_t launchAttentionInputs(const AttentionInputsParams& p, cudaStream_t stream);
cudaError_t launchWideAttention(const AttentionParams& p, cudaStream_t stream);  // of a device of sm_90a alone
cudaError_t launchAttention(const AttentionParams& p, cudaStream_t stream);

}  // namespace replayssm
