// Which heads of a row have forgotten their checkpoint (paper, Appendix F): the product of the decays since it was
// written is at most a threshold. In logarithms: the sum over the committed records of dt a, and, in steps that do not
// flush, of the step's first token, which decays the checkpoint before any output.
#pragma once

#include "../replay_update/loads.cuh"

namespace replayssm {

// Heads of a chunk take a bit each; a launch with more heads a group is refused.
constexpr int kMaxSkippingHeads = 32;

// Bit i: head chunk.head + i has faded. Needs the row's cursors; all lanes call it, each sums one head.
__device__ __forceinline__ uint32_t fadedHeads(const UpdateParams& p, const RowInfo& info, int row, int head, int count,
                                               float logThreshold, int lane) {
  bool faded = false;
  if (info.slot >= 0 && info.tokens > 0 && lane < count) {
    const int64_t place = head + lane;
    const float a = __ldg(p.a + place);
    const float* ring = p.ringDt + info.slot * p.ringDtSlotStride + place * p.ringRows;
    float sum = 0.0f;
#pragma unroll 8
    for (int j = 0; j < info.pending; ++j) {
      int at = info.origin + j;
      float dt = __ldcg(ring + (at < p.ringRows ? at : at - p.ringRows));
      sum += dt > 0.0f ? dt * a : 0.0f;  // an infinite rate times a dt of zero would be NaN
    }
    if (info.pending + info.tokens <= p.window) {
      float dt = __ldcg(static_cast<const float*>(p.dt.data) + row * p.dt.rowStride + place * p.dt.headStride);
      sum += dt > 0.0f ? dt * a : 0.0f;
    }
    faded = sum <= logThreshold;
  }
  return __ballot_sync(0xffffffffu, faded);
}

// A faded head's checkpoint, as a warp of consumers sees it when the head flushes: its 16 rows are zero.
template <class Traits>
__device__ __forceinline__ void clearSlab(float* slab, int lane) {
#pragma unroll 4
  for (int i = lane; i < kSlab * Traits::kStateDim / 4; i += 32) {
    reinterpret_cast<float4*>(slab)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __syncwarp();
}

}  // namespace replayssm
