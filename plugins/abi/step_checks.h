// What the conventional step and the recovery step check and flatten alike.
#pragma once

#include "abi/call.h"
#include "abi/views.h"
#include "kernels/conventional/params.h"
#include "replayssm/update.h"

namespace replayssm {

// A token count no launch of these baselines exceeds, and limits that keep a grid within 32 bits.
constexpr int kMaxBaselineTokens = 64;
constexpr int kBaselineHeadDimStep = 16;        // a warp's largest share of a head's rows
constexpr int64_t kMaxBaselineRows = 1 << 30;   // B * H * P

// One set of token inputs by name; absent ones are empty views. `groups`: the keys' heads, kAny: unknown yet.
struct NamedInputs {
  const char *valueName, *keyName, *dtName, *logDecayName, *betaName;
  const rssm_tensor &value, &key, &dt, &logDecay, &beta;
};

// Shapes follow `value`, which must have been checked.
inline void checkTokenInputs(Checker& check, const NamedInputs& in, int32_t kind, int32_t act, int64_t groups) {
  const int64_t* v = in.value.shape;
  check.tensor(in.keyName, in.key, act, {v[0], v[1], groups, kConventionalStateDim});
  if (kind == RSSM_MAMBA2) {
    check.tensor(in.dtName, in.dt, RSSM_FLOAT32, {v[0], v[1], v[2]});
  } else {
    check.tensor(in.logDecayName, in.logDecay, RSSM_FLOAT32, {v[0], v[1], v[2]});
    check.tensor(in.betaName, in.beta, RSSM_FLOAT32, {v[0], v[1], v[2]});
  }
  check.contiguous(in.valueName, in.value, 3);
  check.contiguous(in.keyName, in.key, 3);
  check.aligned(in.keyName, in.key);
}

template <class Args>
NamedInputs stepInputs(const Args& a) {
  return {"value", "k", "dt", "log_decay", "beta", a.value, a.k, a.dt, a.log_decay, a.beta};
}

// The step's own inputs, outputs and rows.
template <class Args>
void checkStep(Checker& check, const Args& a, int32_t act) {
  check.tensor("value", a.value, act, {kAny, kAny, kAny, kAny});
  if (!check.ok()) return;
  const int64_t* v = a.value.shape;
  checkTokenInputs(check, stepInputs(a), a.kind, act, kAny);
  check.tensor("q", a.q, act, {v[0], v[1], a.k.shape[2], kConventionalStateDim});
  if (a.kind == RSSM_MAMBA2) {
    check.tensor("a", a.a, RSSM_FLOAT32, {v[2]});
    check.contiguous("a", a.a, 0);
    if (a.skip.data != nullptr) {
      check.tensor("skip", a.skip, RSSM_FLOAT32, {v[2]});
      check.contiguous("skip", a.skip, 0);
    }
  }
  check.tensor("out", a.out, act, {v[0], v[1], v[2], v[3]});
  check.contiguous("q", a.q, 3);
  check.aligned("q", a.q);
  check.contiguous("out", a.out, 3);
  check.tensor("slot", a.slot, RSSM_INT32, {v[0]});
  check.tensor("num_tokens", a.num_tokens, RSSM_INT32, {v[0]});
  check.range("value: H", v[2], 1, 4096);
  check.range("value: P", v[3], 1, 4096);
  if (!check.ok()) return;
  if (v[3] % kBaselineHeadDimStep != 0) {
    check.fail(RSSM_UNSUPPORTED, "value: P", "expected a multiple of %d, got %lld", kBaselineHeadDimStep,
               static_cast<long long>(v[3]));
  }
  check.range("value: B", v[0], 0, kMaxBaselineRows / (v[2] * v[3]));
  const int64_t groups = a.k.shape[2];
  if (check.ok() && (groups < 1 || v[2] % groups != 0)) {
    check.fail(RSSM_INVALID_ARGUMENT, "k: G", "expected groups that divide the %lld heads, got %lld",
               static_cast<long long>(v[2]), static_cast<long long>(groups));
  }
}

inline TokenInputs flattenInputs(const NamedInputs& in, const rssm_tensor& query, bool gdn) {
  TokenInputs inputs{};
  inputs.value = tokenTensor(in.value);
  inputs.k = tokenTensor(in.key);
  inputs.q = tokenTensor(query);
  inputs.dt = tokenTensor(gdn ? in.logDecay : in.dt);
  inputs.beta = tokenTensor(in.beta);
  return inputs;
}

template <class Args>
void flattenStep(const Args& a, StepParams& p) {
  p.rows = static_cast<int32_t>(a.value.shape[0]);
  p.tokens = static_cast<int32_t>(a.value.shape[1]);
  p.heads = static_cast<int32_t>(a.value.shape[2]);
  p.headDim = static_cast<int32_t>(a.value.shape[3]);
  p.headsPerGroup = p.heads / static_cast<int32_t>(a.k.shape[2]);
  p.gdn = a.kind == RSSM_GDN;
  p.half = a.value.dtype == RSSM_FLOAT16;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.slotStride = a.slot.stride[0];
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.numTokensStride = a.num_tokens.stride[0];
  p.inputs = flattenInputs(stepInputs(a), a.q, p.gdn);
  p.a = static_cast<const float*>(a.a.data);
  p.skip = static_cast<const float*>(a.skip.data);
  p.out = a.out.data;
  p.outRowStride = a.out.stride[0];
  p.outTokenStride = a.out.stride[1];
  p.outHeadStride = a.out.stride[2];
}

}  // namespace replayssm
