// extern "C" face of the attention over KV slots and of its inputs: validate, flatten, launch.
#include "replayssm/attention.h"

#include <utility>

#include "abi/call.h"
#include "abi/views.h"
#include "kernels/attention/params.h"

namespace replayssm {
namespace {

constexpr int kPiece = 8;  // channels of one 16-byte access
constexpr int64_t kMaxHeadSize = 256;
constexpr int64_t kMaxGridAxis = 65535;   // rows and tokens lie along such axes
constexpr int64_t kMaxHeads = 1 << 12;
constexpr float kLog2E = 1.44269504088896340736f;

// What both operations share: rows, query heads and caches.
template <class Args>
void checkShapes(Checker& check, const Args& a) {
  const int32_t act = activationType(a.q);
  check.tensor("q", a.q, act, {kAny, kAny, kAny, kAny});
  check.tensor("keys", a.keys, act, {kAny, kAny, kAny, kAny});
  if (!check.ok()) return;
  const int64_t *q = a.q.shape, *keys = a.keys.shape;
  check.range("q: B", q[0], 0, kMaxGridAxis);
  check.range("q: T", q[1], 0, kMaxGridAxis);
  check.range("q: Hq", q[2], 1, kMaxHeads);
  check.range("q: D", q[3], kPiece, kMaxHeadSize);
  check.range("keys: S", keys[0], 0, INT32_MAX);
  check.range("keys: Hkv", keys[1], 1, q[2]);
  check.range("keys: depth", keys[2], 1, INT32_MAX / kMaxHeadSize);
  if (!check.ok()) return;
  if (q[3] % kPiece != 0) {
    check.fail(RSSM_UNSUPPORTED, "q: D", "expected a multiple of %d, got %lld", kPiece, static_cast<long long>(q[3]));
  }
  if (q[2] % keys[1] != 0) {
    check.fail(RSSM_INVALID_ARGUMENT, "keys: Hkv", "expected a divisor of Hq = %lld, got %lld",
               static_cast<long long>(q[2]), static_cast<long long>(keys[1]));
  }
  check.tensor("keys", a.keys, act, {kAny, kAny, kAny, q[3]});
  check.tensor("values", a.values, act, {keys[0], keys[1], keys[2], q[3]});
  for (const auto& [name, t] : {std::pair<const char*, const rssm_tensor*>{"keys", &a.keys}, {"values", &a.values}}) {
    check.contiguous(name, *t, 0);
    check.aligned(name, *t);
  }
  for (const auto& [name, t] : {std::pair<const char*, const rssm_tensor*>{"slot", &a.slot},
                                {"start", &a.start},
                                {"num_tokens", &a.num_tokens}}) {
    check.tensor(name, *t, RSSM_INT32, {q[0]});
    check.contiguous(name, *t, 0);
  }
}

template <class Params, class Args>
Params flattenShapes(const Args& a) {
  Params p{};
  p.rows = static_cast<int32_t>(a.q.shape[0]);
  p.tokens = static_cast<int32_t>(a.q.shape[1]);
  p.heads = static_cast<int32_t>(a.q.shape[2]);
  p.size = static_cast<int32_t>(a.q.shape[3]);
  p.slots = static_cast<int32_t>(a.keys.shape[0]);
  p.kvHeads = static_cast<int32_t>(a.keys.shape[1]);
  p.depth = static_cast<int32_t>(a.keys.shape[2]);
  p.float16 = a.q.dtype == RSSM_FLOAT16;
  p.programmaticLaunch = (a.flags & RSSM_ATTENTION_PROGRAMMATIC_LAUNCH) != 0;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.start = static_cast<const int32_t*>(a.start.data);
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.q = a.q.data;
  return p;
}

void checkPair(Checker& check, const char* name, const rssm_tensor& t, const rssm_tensor& other) {
  if (check.ok() && isAbsent(t) != isAbsent(other)) {
    check.fail(RSSM_INVALID_ARGUMENT, name, "expected both of the pair or none, got one");
  }
}

void checkInputs(Checker& check, const rssm_attention_inputs_args& a) {
  checkShapes(check, a);
  if (!check.ok()) return;
  const int32_t act = activationType(a.q);
  const int64_t *q = a.q.shape, *keys = a.keys.shape;
  check.tensor("k", a.k, act, {q[0], q[1], keys[1], q[3]});
  check.tensor("v", a.v, act, {q[0], q[1], keys[1], q[3]});
  check.tensor("q_out", a.q_out, act, {q[0], q[1], q[2], q[3]});
  check.contiguous("q_out", a.q_out, 0);
  for (const auto& [name, t] : {std::pair<const char*, const rssm_tensor*>{"q", &a.q},
                                {"k", &a.k},
                                {"v", &a.v},
                                {"q_out", &a.q_out}}) {
    check.contiguous(name, *t, 3);
    check.aligned(name, *t);
  }
  checkPair(check, "k_weight", a.k_weight, a.q_weight);
  checkPair(check, "sine", a.sine, a.cosine);
  if (check.ok() && !isAbsent(a.q_weight)) {
    check.tensor("q_weight", a.q_weight, RSSM_FLOAT32, {q[3]});
    check.tensor("k_weight", a.k_weight, RSSM_FLOAT32, {q[3]});
    check.contiguous("q_weight", a.q_weight, 0);
    check.contiguous("k_weight", a.k_weight, 0);
    check.aligned("q_weight", a.q_weight);
    check.aligned("k_weight", a.k_weight);
    if (check.ok() && !(a.eps >= 0.0f)) {
      check.fail(RSSM_INVALID_ARGUMENT, "eps", "expected a number >= 0, got %g", static_cast<double>(a.eps));
    }
  }
  if (!check.ok() || isAbsent(a.cosine)) return;
  check.tensor("cosine", a.cosine, RSSM_FLOAT32, {kAny, kAny});
  if (!check.ok()) return;
  check.range("cosine: rows", a.cosine.shape[0], keys[2], INT32_MAX);
  check.range("cosine: R", a.cosine.shape[1], kPiece, q[3] / 2);
  if (check.ok() && a.cosine.shape[1] % kPiece != 0) {
    check.fail(RSSM_UNSUPPORTED, "cosine: R", "expected a multiple of %d, got %lld", kPiece,
               static_cast<long long>(a.cosine.shape[1]));
  }
  check.tensor("sine", a.sine, RSSM_FLOAT32, {a.cosine.shape[0], a.cosine.shape[1]});
  check.contiguous("cosine", a.cosine, 0);
  check.contiguous("sine", a.sine, 0);
  check.aligned("cosine", a.cosine);
  check.aligned("sine", a.sine);
}

AttentionInputsParams flatten(const rssm_attention_inputs_args& a) {
  auto p = flattenShapes<AttentionInputsParams>(a);
  p.half = isAbsent(a.cosine) ? 0 : static_cast<int32_t>(a.cosine.shape[1]);
  p.eps = a.eps;
  p.weightOffset = a.weight_offset;
  p.k = a.k.data;
  p.v = a.v.data;
  p.qRow = a.q.stride[0];
  p.qToken = a.q.stride[1];
  p.qHead = a.q.stride[2];
  p.kRow = a.k.stride[0];
  p.kToken = a.k.stride[1];
  p.kHead = a.k.stride[2];
  p.vRow = a.v.stride[0];
  p.vToken = a.v.stride[1];
  p.vHead = a.v.stride[2];
  p.qWeight = static_cast<const float*>(a.q_weight.data);
  p.kWeight = static_cast<const float*>(a.k_weight.data);
  p.cosine = static_cast<const float*>(a.cosine.data);
  p.sine = static_cast<const float*>(a.sine.data);
  p.qOut = a.q_out.data;
  p.keys = a.keys.data;
  p.values = a.values.data;
  return p;
}

void checkAttention(Checker& check, const rssm_attention_args& a) {
  checkShapes(check, a);
  if (!check.ok()) return;
  const int64_t* q = a.q.shape;
  check.tensor("out", a.out, activationType(a.q), {q[0], q[1], q[2], q[3]});
  for (const auto& [name, t] : {std::pair<const char*, const rssm_tensor*>{"q", &a.q}, {"out", &a.out}}) {
    check.contiguous(name, *t, 0);
    check.aligned(name, *t);
  }
  // a sequence's query rows are told apart in float32, a launch's items counted in 32 bits
  if (check.ok()) check.range("q: T * Hq", q[1] * q[2], 0, 16 * kMaxGridAxis);
  if (check.ok()) check.range("q: B * T * Hq", q[0] * q[1] * q[2], 0, INT32_MAX / 2);
}

AttentionParams flatten(const rssm_attention_args& a, int multiprocessors) {
  auto p = flattenShapes<AttentionParams>(a);
  p.scale = a.scale * kLog2E;
  p.keys = a.keys.data;
  p.values = a.values.data;
  p.out = a.out.data;
  p.multiprocessors = multiprocessors;
  p.splits = attentionSplits(p);
  return p;
}

// Partial sums, then statistics; none where the keys are not split.
size_t partialBytes(const AttentionParams& p) {
  const size_t parts = static_cast<size_t>(p.rows) * static_cast<size_t>(p.tokens) * static_cast<size_t>(p.heads) *
                       static_cast<size_t>(p.splits);
  return p.splits == 1 ? 0 : parts * static_cast<size_t>(p.size) * sizeof(float);
}

size_t workspaceBytes(const AttentionParams& p) {
  const size_t partial = partialBytes(p);
  return partial + partial / (static_cast<size_t>(p.size) * sizeof(float)) * sizeof(float2);
}

bool checkCall(Checker& check, const rssm_attention_args* args, int32_t multiprocessors) {
  if (checkArguments(check, args)) checkAttention(check, *args);
  return check.range("multiprocessors", multiprocessors, 1, INT32_MAX) && check.ok();
}

cudaError_t launchInputs(const rssm_attention_inputs_args& a, cudaStream_t stream) {
  const AttentionInputsParams p = flatten(a);
  return p.rows == 0 || p.tokens == 0 ? cudaSuccess : launchAttentionInputs(p, stream);
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_attention_inputs(const rssm_attention_inputs_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_attention_inputs", args, stream, error, replayssm::checkInputs,
                                replayssm::launchInputs);
}

rssm_status rssm_attention_workspace(const rssm_attention_args* args, int32_t multiprocessors, size_t* bytes,
                                     rssm_error* error) {
  replayssm::Checker check("rssm_attention_workspace", error);
  replayssm::checkCall(check, args, multiprocessors);
  return replayssm::answerBytes(
      check, bytes, [&] { return replayssm::workspaceBytes(replayssm::flatten(*args, multiprocessors)); });
}

rssm_status rssm_attention(const rssm_attention_args* args, int32_t multiprocessors, void* workspace,
                           size_t workspace_bytes, void* stream, rssm_error* error) {
  replayssm::Checker check("rssm_attention", error);
  if (!replayssm::checkCall(check, args, multiprocessors)) return check.status();
  replayssm::AttentionParams p = replayssm::flatten(*args, multiprocessors);
  if (p.rows == 0 || p.tokens == 0) return check.status();
  const size_t needed = replayssm::workspaceBytes(p);
  if (!replayssm::checkWorkspace(check, workspace, workspace_bytes, needed)) {
    return check.status();
  }
  p.partial = static_cast<float*>(workspace);
  p.statistic = reinterpret_cast<float2*>(static_cast<char*>(workspace) + replayssm::partialBytes(p));
  replayssm::checkLaunch(check, replayssm::launchAttention(p, static_cast<cudaStream_t>(stream)));
  return check.status();
}
