// extern "C" face of the update family: validate, flatten to UpdateParams, dispatch.
#include "replayssm/update.h"

#include "abi/call.h"
#include "abi/copies.h"
#include "abi/update_params.h"
#include "abi/update_problem.h"
#include "kernels/replay_update/dispatch.h"

namespace replayssm {
namespace {

constexpr int kMaxWindow = 64;
constexpr int kMaxTokens = 16;
constexpr int64_t kMaxRingRows = 256;  // a row's number takes eight bits in the kernels' item headers
constexpr int kMaxLayer = 65535;    // layers and heads take 16 bits each in the key of stochastic rounding
constexpr int kMaxHeads = 4096;       // keeps a worker's arithmetic within 32 bits
constexpr int64_t kMaxItems = 1 << 30;  // B * H, likewise

struct Named {
  const char* name;
  const rssm_tensor& tensor;
};

void checkCursors(Checker& check, const rssm_update_args& a, int64_t rows) {
  check.tensor("slot", a.slot, RSSM_INT32, {rows});
  check.tensor("num_tokens", a.num_tokens, RSSM_INT32, {rows});
  int64_t slots = a.checkpoint.shape[0];
  check.tensor("origin", a.origin, RSSM_INT32, {slots});
  check.tensor("h", a.h, RSSM_INT32, {slots});
  check.contiguous("origin", a.origin, 0);
  check.contiguous("h", a.h, 0);
}

void checkInputs(Checker& check, const rssm_update_args& a, int32_t act) {
  const int64_t* v = a.value.shape;
  int64_t groups = a.k.shape[2], stateDim = a.k.shape[3];
  check.tensor("value", a.value, act, {kAny, kAny, kAny, kAny});
  check.tensor("k", a.k, act, {v[0], v[1], kAny, kAny});
  check.tensor("q", a.q, act, {v[0], v[1], groups, stateDim});
  if (a.kind == RSSM_MAMBA2) {
    check.tensor("dt", a.dt, RSSM_FLOAT32, {v[0], v[1], v[2]});
    check.tensor("a", a.a, RSSM_FLOAT32, {v[2]});
    check.contiguous("a", a.a, 0);
    if (a.skip.data != nullptr) {
      check.tensor("skip", a.skip, RSSM_FLOAT32, {v[2]});
      check.contiguous("skip", a.skip, 0);
    }
  } else {
    check.tensor("log_decay", a.log_decay, RSSM_FLOAT32, {v[0], v[1], v[2]});
    check.tensor("beta", a.beta, RSSM_FLOAT32, {v[0], v[1], v[2]});
  }
  check.tensor("out", a.out, act, {v[0], v[1], v[2], v[3]});
  for (const Named& named : {Named{"value", a.value}, Named{"k", a.k}, Named{"q", a.q}}) {
    check.contiguous(named.name, named.tensor, 3);
    check.aligned(named.name, named.tensor);
  }
  check.contiguous("out", a.out, 3);
  check.aligned("out", a.out);  // written in words of several elements
}

// Address and slot stride suit the bulk copy engine; a null tensor does.
void checkSlots(Checker& check, const Named& named) {
  const rssm_tensor& t = named.tensor;
  if (!check.ok() || t.data == nullptr) return;
  const bool strides = t.shape[0] <= 1 || elementBytes(t.dtype, t.stride[0]) % kBulkAlignment == 0;
  if (reinterpret_cast<uintptr_t>(t.data) % kBulkAlignment != 0 || !strides) {
    check.fail(RSSM_INVALID_ARGUMENT, named.name,
               "expected an address and a slot stride of whole %d bytes, got %p and %lld elements", kBulkAlignment,
               t.data, static_cast<long long>(t.stride[0]));
  }
}

void checkState(Checker& check, const rssm_update_args& a, int32_t act) {
  const int64_t* v = a.value.shape;
  int64_t groups = a.k.shape[2], stateDim = a.k.shape[3], slots = a.checkpoint.shape[0];
  int64_t ringRows = a.ring_value.shape[2];
  checkCopies(check, {a.checkpoint, a.checkpoint_scale, a.read, a.read_scale, a.read_head_scale}, slots);
  check.tensor("checkpoint", a.checkpoint, a.checkpoint.dtype, {slots, v[2], v[3], stateDim});
  check.tensor("ring_value", a.ring_value, a.kind == RSSM_GDN ? RSSM_FLOAT16 : act, {slots, v[2], kAny, v[3]});
  check.tensor("ring_k", a.ring_k, act, {slots, groups, ringRows, stateDim});
  check.tensor("ring_dt", a.ring_dt, RSSM_FLOAT32, {slots, v[2], ringRows});
  for (const Named& named : {Named{"ring_value", a.ring_value}, Named{"ring_k", a.ring_k}}) {
    check.contiguous(named.name, named.tensor, 1);
    check.aligned(named.name, named.tensor);
  }
  for (const Named& named : {Named{"checkpoint", a.checkpoint}, Named{"checkpoint_scale", a.checkpoint_scale},
                             Named{"read", a.read}, Named{"read_scale", a.read_scale}}) {
    checkSlots(check, named);
  }
  if (a.checkpoint.dtype != RSSM_FLOAT32) {
    check.tensor("seed", a.seed, RSSM_INT64, {slots});
    check.tensor("position", a.position, RSSM_INT32, {slots});
    check.contiguous("seed", a.seed, 0);
    check.contiguous("position", a.position, 0);
    check.range("layer", a.layer, 0, kMaxLayer);
    check.range("head_offset", a.head_offset, 0, kMaxLayer - v[2]);
  }
  check.contiguous("ring_dt", a.ring_dt, 1);
  if (a.kind == RSSM_GDN) {
    check.tensor("ring_key_factor", a.ring_key_factor, RSSM_FLOAT32, {slots, groups, ringRows});
    check.contiguous("ring_key_factor", a.ring_key_factor, 1);
    if (a.read.data != nullptr || a.checkpoint.dtype != RSSM_FLOAT32) {
      check.tensor("ring_v", a.ring_v, act, {slots, v[2], ringRows, v[3]});
      check.tensor("ring_beta", a.ring_beta, RSSM_FLOAT32, {slots, v[2], ringRows});
      check.contiguous("ring_v", a.ring_v, 1);
      check.aligned("ring_v", a.ring_v);
      check.contiguous("ring_beta", a.ring_beta, 1);
    }
  }
  if (!check.ok()) return;
  if (ringRows < a.window + v[1]) {
    check.fail(RSSM_INVALID_ARGUMENT, "ring_value", "expected C >= window + T = %lld rows, got %lld",
               static_cast<long long>(a.window + v[1]), static_cast<long long>(ringRows));
  }
  check.range("ring_value: C", ringRows, 1, kMaxRingRows);
}

}  // namespace

UpdateProblem updateProblem(const rssm_update_args* args, Checker& check, int32_t multiprocessors) {
  UpdateProblem result{};
  result.empty = true;
  if (!checkArguments(check, args)) return result;
  const rssm_update_args& a = *args;
  check.range("window", a.window, 1, kMaxWindow);
  check.range("kind", a.kind, RSSM_MAMBA2, RSSM_GDN);
  if (!check.ok()) return result;
  const int32_t act = activationType(a.value);
  checkInputs(check, a, act);
  if (!check.ok()) return result;
  check.range("value: T", a.value.shape[1], 0, kMaxTokens);
  int64_t heads = a.value.shape[2], groups = a.k.shape[2];
  check.range("value: H", heads, 1, kMaxHeads);
  check.range("value: B", a.value.shape[0], 0, kMaxItems / (heads > 0 ? heads : 1));
  if (!check.ok()) return result;
  if (groups < 1 || heads % groups != 0) {
    check.fail(RSSM_INVALID_ARGUMENT, "k: G", "expected groups that divide the %lld heads, got %lld",
               static_cast<long long>(heads), static_cast<long long>(groups));
  }
  checkState(check, a, act);
  checkCursors(check, a, a.value.shape[0]);
  if (!check.ok()) return result;
  result.params = flatten(a);
  UpdateParams& p = result.params;
  result.act = act == RSSM_FLOAT16 ? ActivationType::kFloat16 : ActivationType::kBfloat16;
  if (p.rows == 0 || p.tokens == 0) return result;
  p.multiprocessors = multiprocessors;
  result.empty = multiprocessors == 0 && !checkLaunch(check, findMultiprocessors(p.multiprocessors));
  return result;
}

bool useTickets(Checker& check, UpdateParams& p, void* workspace, size_t bytes) {
  p.tickets = static_cast<uint32_t*>(workspace);
  return checkWorkspace(check, workspace, bytes, RSSM_UPDATE_MAX_WORKSPACE_BYTES, alignof(uint32_t));
}

}  // namespace replayssm

uint32_t rssm_abi_version(void) { return RSSM_ABI_VERSION; }

const char* rssm_update_supported(void) { return replayssm::supportedUpdates(); }

rssm_status rssm_update_workspace(const rssm_update_args* args, size_t* bytes, rssm_error* error) {
  replayssm::Checker check("rssm_update_workspace", error);
  const replayssm::UpdatePlan plan = replayssm::updatePlan(args, check);
  return replayssm::answerBytes(check, bytes,
                                [&] { return plan.choice.launcher == nullptr ? 0 : RSSM_UPDATE_MAX_WORKSPACE_BYTES; });
}

rssm_status rssm_update(const rssm_update_args* args, void* workspace, size_t workspace_bytes, void* stream,
                        rssm_error* error) {
  replayssm::Checker check("rssm_update", error);
  replayssm::UpdatePlan plan = replayssm::updatePlan(args, check);
  if (!check.ok() || plan.choice.launcher == nullptr) return check.status();
  if (!replayssm::useTickets(check, plan.params, workspace, workspace_bytes)) return check.status();
  const auto on = static_cast<cudaStream_t>(stream);
  replayssm::checkLaunch(check, plan.choice.launcher(plan.params, plan.choice.launch, on));
  return check.status();
}
