// Prompt lookup: a block a row tries every place of its text.
#include "kernels/common/launch.cuh"
#include "params.h"

namespace replayssm {
namespace {

constexpr int kThreads = 256;

// Tokens up to and with the one at `place` that equal the text's last ones, at most `most`.
__device__ __forceinline__ int32_t matchAt(const int64_t* text, int64_t end, int64_t place, int32_t most) {
  int32_t matched = 0;
  while (matched < most && matched <= place && text[place - matched] == text[end - matched]) ++matched;
  return matched;
}

__global__ void __launch_bounds__(kThreads) promptLookupKernel(const __grid_constant__ PromptLookupParams p) {
  __shared__ unsigned long long best[kThreads / 32];
  const int64_t asked = p.row[blockIdx.x];
  const int64_t entry = asked >= 0 && asked < p.entries ? asked : p.entries - 1;
  const int64_t* text = p.history + entry * p.positions;
  const int64_t known = p.length[entry];
  const int64_t end = (known < p.positions ? known : p.positions) - 1;  // of the last token
  const int64_t room = p.room[entry] - 1;
  unsigned long long found = 0;  // longest match first, of equals the latest place, which is stored plus one
  if (room > 0) {
    for (int64_t place = threadIdx.x; place < end; place += kThreads) {
      const auto matched = static_cast<unsigned long long>(matchAt(text, end, place, p.maxNgram));
      const unsigned long long candidate = matched << 40 | static_cast<unsigned long long>(place + 1);
      if (matched > 0 && candidate > found) found = candidate;
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, found, step);
    found = other > found ? other : found;
  }
  if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = found;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) found = best[w] > found ? best[w] : found;
  const auto source = static_cast<int64_t>(found & ((1ull << 40) - 1));  // of the first draft
  const int64_t count = found == 0 ? 0 : room < p.drafts ? room : p.drafts;
  if (threadIdx.x == 0) p.draftCount[entry] = count;
  for (int32_t i = threadIdx.x; i < count; i += kThreads) {
    p.draft[entry * p.drafts + i] = text[source + i % (end + 1 - source)];
  }
}

}  // namespace

cudaError_t launchPromptLookup(const PromptLookupParams& p, cudaStream_t stream) {
  return launchOn(stream, false, promptLookupKernel, dim3(static_cast<unsigned>(p.rows)), kThreads, p);
}

}  // namespace replayssm
