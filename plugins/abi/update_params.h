// The update's arguments as the kernels take them: plain pointers and strides. Nothing is checked here.
#pragma once

#include "abi/copies.h"
#include "abi/views.h"
#include "kernels/replay_update/dispatch.h"
#include "replayssm/update.h"

namespace replayssm {

inline StateFormat stateFormat(int32_t dtype) {
  switch (dtype) {
    case RSSM_FLOAT16: return StateFormat::kFloat16;
    case RSSM_FLOAT8_E4M3: return StateFormat::kE4m3;
    case RSSM_FLOAT4_E2M1: return StateFormat::kE2m1;
    default: return StateFormat::kFloat32;
  }
}

inline StateFormats stateFormats(const rssm_update_args& a) {
  return {stateFormat(a.checkpoint.dtype), stateFormat(a.read.data != nullptr ? a.read.dtype : a.checkpoint.dtype)};
}

inline CheckpointCopy checkpointCopy(const rssm_tensor& t, const rssm_tensor& scale, const rssm_tensor& headScale) {
  return {t.data,
          elementBytes(t.dtype, t.stride[0]),
          scale.data,
          elementBytes(scale.dtype, scale.stride[0]),
          static_cast<float*>(headScale.data),
          headScale.stride[0]};
}

inline UpdateParams flatten(const rssm_update_args& a) {
  UpdateParams p{};
  p.rows = static_cast<int32_t>(a.value.shape[0]);
  p.tokens = static_cast<int32_t>(a.value.shape[1]);
  p.heads = static_cast<int32_t>(a.value.shape[2]);
  p.headDim = static_cast<int32_t>(a.value.shape[3]);
  p.groups = static_cast<int32_t>(a.k.shape[2]);
  p.stateDim = static_cast<int32_t>(a.k.shape[3]);
  p.headsPerGroup = p.heads / p.groups;
  p.window = a.window;
  p.slots = static_cast<int32_t>(a.checkpoint.shape[0]);
  p.ringRows = static_cast<int32_t>(a.ring_value.shape[2]);
  p.programmaticLaunch = (a.flags & RSSM_UPDATE_PROGRAMMATIC_LAUNCH) != 0;
  p.settled = p.programmaticLaunch && (a.flags & RSSM_UPDATE_SETTLED_STATE) != 0;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.slotStride = a.slot.stride[0];
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.numTokensStride = a.num_tokens.stride[0];
  p.origin = static_cast<const int32_t*>(a.origin.data);
  p.pending = static_cast<const int32_t*>(a.h.data);
  p.value = tokenTensor(a.value);
  p.k = tokenTensor(a.k);
  p.q = tokenTensor(a.q);
  p.dt = tokenTensor(a.kind == RSSM_GDN ? a.log_decay : a.dt);
  p.beta = tokenTensor(a.beta);
  p.a = static_cast<const float*>(a.a.data);
  p.skip = static_cast<const float*>(a.skip.data);
  p.out = a.out.data;
  p.outRowStride = a.out.stride[0];
  p.outTokenStride = a.out.stride[1];
  p.outHeadStride = a.out.stride[2];
  p.layer = a.layer;
  p.headOffset = a.head_offset;
  p.seed = static_cast<const int64_t*>(a.seed.data);
  p.position = static_cast<const int32_t*>(a.position.data);
  p.recurrence = checkpointCopy(a.checkpoint, a.checkpoint_scale, rssm_tensor{});
  p.read = a.read.data == nullptr ? p.recurrence : checkpointCopy(a.read, a.read_scale, a.read_head_scale);
  p.checkpoint = static_cast<float*>(a.checkpoint.data);
  p.checkpointSlotStride = a.checkpoint.stride[0];
  p.ringValue = a.ring_value.data;
  p.ringValueSlotStride = a.ring_value.stride[0];
  p.ringKey = a.ring_k.data;
  p.ringKeySlotStride = a.ring_k.stride[0];
  p.ringDt = static_cast<float*>(a.ring_dt.data);
  p.ringDtSlotStride = a.ring_dt.stride[0];
  p.ringV = a.ring_v.data;
  p.ringVSlotStride = a.ring_v.stride[0];
  p.ringBeta = static_cast<float*>(a.ring_beta.data);
  p.ringBetaSlotStride = a.ring_beta.stride[0];
  p.ringKeyFactor = static_cast<float*>(a.ring_key_factor.data);
  p.ringKeyFactorSlotStride = a.ring_key_factor.stride[0];
  return p;
}

}  // namespace replayssm
