// Checks of the prompt scan's arguments: every tensor's shape, dtype, strides and alignment against the sizes that
// `value`, `k`, `checkpoint` and `ring_k` fix.
#pragma once

#include "abi/copies.h"
#include "abi/views.h"
#include "kernels/prefill/params.h"
#include "replayssm/prefill.h"

namespace replayssm {

constexpr int kMaxPromptRows = 65535;      // the grid's second axis
constexpr int kMaxPromptTokens = 1 << 24;  // of a call; keeps chunk arithmetic within 32 bits
constexpr int kMaxPromptSize = 4096;

struct NamedTensor {
  const char* name;
  const rssm_tensor& tensor;
};

struct PrefillSizes {
  int64_t rows, tokens, heads, headDim, groups, stateDim, slots, ringRows;
  int32_t act;
  bool gdn, staged, rederives;  // staged: the pool is not one float32 checkpoint
};

inline PrefillSizes prefillSizes(const rssm_prefill_args& a) {
  PrefillSizes s{};
  s.rows = a.value.shape[0];
  s.tokens = a.value.shape[1];
  s.heads = a.value.shape[2];
  s.headDim = a.value.shape[3];
  s.groups = a.k.shape[2];
  s.stateDim = a.k.shape[3];
  s.slots = a.checkpoint.shape[0];
  s.ringRows = a.ring_k.shape[2];
  s.act = activationType(a.value);
  s.gdn = a.kind == RSSM_GDN;
  s.staged = a.checkpoint.dtype != RSSM_FLOAT32 || a.read.data != nullptr;
  s.rederives = s.gdn && s.staged;
  return s;
}

inline void checkPrefillInputs(Checker& check, const rssm_prefill_args& a, const PrefillSizes& s) {
  check.tensor("value", a.value, s.act, {kAny, kAny, kAny, kAny});
  check.tensor("k", a.k, s.act, {s.rows, s.tokens, kAny, kAny});
  check.tensor("q", a.q, s.act, {s.rows, s.tokens, s.groups, s.stateDim});
  check.tensor("out", a.out, s.act, {s.rows, s.tokens, s.heads, s.headDim});
  for (const NamedTensor& named : {NamedTensor{"value", a.value}, NamedTensor{"k", a.k}, NamedTensor{"q", a.q},
                                   NamedTensor{"out", a.out}}) {
    check.contiguous(named.name, named.tensor, 3);
    check.aligned(named.name, named.tensor);
  }
  if (s.gdn) {
    check.tensor("log_decay", a.log_decay, RSSM_FLOAT32, {s.rows, s.tokens, s.heads});
    check.tensor("beta", a.beta, RSSM_FLOAT32, {s.rows, s.tokens, s.heads});
    return;
  }
  check.tensor("dt", a.dt, RSSM_FLOAT32, {s.rows, s.tokens, s.heads});
  check.tensor("a", a.a, RSSM_FLOAT32, {s.heads});
  check.contiguous("a", a.a, 0);
  if (a.skip.data == nullptr) return;
  check.tensor("skip", a.skip, RSSM_FLOAT32, {s.heads});
  check.contiguous("skip", a.skip, 0);
}

inline void checkPrefillSizes(Checker& check, const PrefillSizes& s) {
  check.range("value: B", s.rows, 0, kMaxPromptRows);
  check.range("value: T", s.tokens, 0, kMaxPromptTokens);
  check.range("value: H", s.heads, 1, kMaxPromptSize);
  check.range("value: P", s.headDim, 1, kMaxPromptSize);
  check.range("k: N", s.stateDim, 1, kMaxPromptSize);
  if (!check.ok()) return;
  if (s.groups < 1 || s.heads % s.groups != 0) {
    check.fail(RSSM_INVALID_ARGUMENT, "k: G", "expected groups that divide the %lld heads, got %lld",
               static_cast<long long>(s.heads), static_cast<long long>(s.groups));
  }
}

inline void checkPrefillRing(Checker& check, const rssm_prefill_args& a, const PrefillSizes& s) {
  check.tensor("ring_value", a.ring_value, s.gdn ? RSSM_FLOAT16 : s.act, {s.slots, s.heads, s.ringRows, s.headDim});
  check.tensor("ring_k", a.ring_k, s.act, {s.slots, s.groups, s.ringRows, s.stateDim});
  check.tensor("ring_dt", a.ring_dt, RSSM_FLOAT32, {s.slots, s.heads, s.ringRows});
  check.contiguous("ring_dt", a.ring_dt, 1);
  for (const NamedTensor& named : {NamedTensor{"ring_value", a.ring_value}, NamedTensor{"ring_k", a.ring_k}}) {
    check.contiguous(named.name, named.tensor, 1);
    check.aligned(named.name, named.tensor);
  }
  if (s.gdn) {
    check.tensor("ring_key_factor", a.ring_key_factor, RSSM_FLOAT32, {s.slots, s.groups, s.ringRows});
    check.contiguous("ring_key_factor", a.ring_key_factor, 1);
  }
  if (s.rederives) {
    check.tensor("ring_v", a.ring_v, s.act, {s.slots, s.heads, s.ringRows, s.headDim});
    check.contiguous("ring_v", a.ring_v, 1);
    check.aligned("ring_v", a.ring_v);
    check.tensor("ring_beta", a.ring_beta, RSSM_FLOAT32, {s.slots, s.heads, s.ringRows});
    check.contiguous("ring_beta", a.ring_beta, 1);
  }
  if (!check.ok()) return;
  if (s.ringRows <= a.window) {
    check.fail(RSSM_INVALID_ARGUMENT, "ring_k", "expected C > window = %d rows, got %lld", a.window,
               static_cast<long long>(s.ringRows));
  }
}

inline void checkPrefillState(Checker& check, const rssm_prefill_args& a, const PrefillSizes& s) {
  checkCopies(check, {a.checkpoint, a.checkpoint_scale, a.read, a.read_scale, a.read_head_scale}, kAny);
  check.tensor("checkpoint", a.checkpoint, a.checkpoint.dtype, {kAny, s.heads, s.headDim, s.stateDim});
  check.aligned("checkpoint", a.checkpoint);
  if (a.read.data != nullptr) check.aligned("read", a.read);
  if (a.checkpoint.dtype != RSSM_FLOAT32) {
    check.range("layer", a.layer, 0, 65535);
    check.range("head_offset", a.head_offset, 0, 65535 - s.heads);
    check.tensor("position", a.position, RSSM_INT32, {s.slots});
    check.tensor("seed", a.seed, RSSM_INT64, {s.slots});
    check.contiguous("position", a.position, 0);
    check.contiguous("seed", a.seed, 0);
  }
  if (a.carry.data == nullptr) return;
  check.tensor("carry", a.carry, RSSM_FLOAT32, {kAny, s.heads, s.headDim, s.stateDim});
  check.contiguous("carry", a.carry, 1);
  check.aligned("carry", a.carry);
  check.tensor("row_flags", a.row_flags, RSSM_INT32, {s.rows});
  check.tensor("carry_index", a.carry_index, RSSM_INT32, {s.rows});
}

inline void checkPrefillRows(Checker& check, const rssm_prefill_args& a, const PrefillSizes& s) {
  check.tensor("slot", a.slot, RSSM_INT32, {s.rows});
  check.tensor("num_tokens", a.num_tokens, RSSM_INT32, {s.rows});
  if (a.row_flags.data != nullptr) check.tensor("row_flags", a.row_flags, RSSM_INT32, {s.rows});
  check.tensor("origin", a.origin, RSSM_INT32, {s.slots});
  check.tensor("h", a.h, RSSM_INT32, {s.slots});
  check.contiguous("origin", a.origin, 0);
  check.contiguous("h", a.h, 0);
}

}  // namespace replayssm
