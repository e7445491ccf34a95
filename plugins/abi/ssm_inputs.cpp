// extern "C" face of the convolution and of the inputs of a recurrence: validate, flatten, launch.
#include "replayssm/ssm_inputs.h"

#include "abi/alignment.h"
#include "abi/call.h"
#include "abi/views.h"
#include "kernels/ssm_inputs/params.h"

namespace replayssm {
namespace {

constexpr int kMinTaps = 2;
constexpr int kMaxTaps = 8;
constexpr int kMaxRows = 65535;           // rows lie along the grid's third axis
constexpr int64_t kMaxTokens = 1 << 20;   // tiles of tokens along its second
constexpr int64_t kMaxChannels = 1 << 24;

void checkConv(Checker& check, const rssm_conv1d_args& a, bool prompt) {
  const int32_t act = activationType(a.x);
  const int64_t* x = a.x.shape;
  check.tensor("x", a.x, act, {kAny, kAny, kAny});
  check.contiguous("x", a.x, 2);
  if (!check.ok()) return;
  check.range("x: B", x[0], 0, kMaxRows);
  check.range("x: T", x[1], 0, prompt ? kMaxTokens : kTokenTile);
  check.range("x: D", x[2], 1, kMaxChannels);
  check.tensor("slot", a.slot, RSSM_INT32, {x[0]});
  check.tensor("num_tokens", a.num_tokens, RSSM_INT32, {x[0]});
  check.tensor("position", a.position, RSSM_INT32, {kAny});
  check.contiguous("position", a.position, 0);
  check.range("position: S", a.position.shape[0], x[0] > 0 ? 1 : 0, INT32_MAX);
  check.tensor("weight", a.weight, RSSM_FLOAT32, {x[2], kAny});
  check.contiguous("weight", a.weight, 0);
  if (!check.ok()) return;
  check.range("weight: K", a.weight.shape[1], kMinTaps, kMaxTaps);
  if (a.bias.data != nullptr) {
    check.tensor("bias", a.bias, RSSM_FLOAT32, {x[2]});
    check.contiguous("bias", a.bias, 0);
  }
  check.tensor("window", a.window, act, {a.position.shape[0], kAny, x[2]});
  check.contiguous("window", a.window, 1);
  check.tensor("out", a.out, act, {x[0], x[1], x[2]});
  check.contiguous("out", a.out, 2);
  if (!check.ok()) return;
  const int64_t taps = a.weight.shape[1], ringRows = a.window.shape[1];
  const int64_t needed = taps - 1 + (prompt ? 0 : x[1]);
  if (ringRows < needed || ringRows > INT32_MAX) {
    check.fail(RSSM_INVALID_ARGUMENT, "window: R", "expected at least K - 1%s = %lld rows, got %lld",
               prompt ? "" : " + T", static_cast<long long>(needed), static_cast<long long>(ringRows));
  }
}

ActTensor actTensor(const rssm_tensor& t) { return {t.data, t.stride[0], t.stride[1]}; }

SsmInputsParams flatten(const rssm_conv1d_args& a, bool prompt) {
  SsmInputsParams p{};
  p.rows = static_cast<int32_t>(a.x.shape[0]);
  p.slots = static_cast<int32_t>(a.position.shape[0]);
  p.tokens = static_cast<int32_t>(a.x.shape[1]);
  p.channels = static_cast<int32_t>(a.x.shape[2]);
  p.taps = static_cast<int32_t>(a.weight.shape[1]);
  p.ringRows = static_cast<int32_t>(a.window.shape[1]);
  p.float16 = a.x.dtype == RSSM_FLOAT16;
  p.prompt = prompt;
  p.programmaticLaunch = (a.flags & RSSM_CONV1D_PROGRAMMATIC_LAUNCH) != 0;
  const bool wide = p.channels % 4 == 0 && areAligned({&a.x, &a.window, &a.out}, 8) && isAligned(a.weight, 16);
  p.vector = wide ? 4 : 1;
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.slotStride = a.slot.stride[0];
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.numTokensStride = a.num_tokens.stride[0];
  p.position = static_cast<const int32_t*>(a.position.data);
  p.x = actTensor(a.x);
  p.weight = static_cast<const float*>(a.weight.data);
  p.bias = static_cast<const float*>(a.bias.data);
  p.window = a.window.data;
  p.windowSlotStride = a.window.stride[0];
  p.out = a.out.data;
  p.outRowStride = a.out.stride[0];
  p.outTokenStride = a.out.stride[1];
  return p;
}

void checkDecay(Checker& check, const rssm_ssm_inputs_args& a) {
  const bool gdn = a.kind == RSSM_GDN;
  const int32_t act = activationType(a.conv.x);
  const int64_t rows = a.conv.x.shape[0], tokens = a.conv.x.shape[1];
  check.tensor("decay_in", a.decay_in, act, {rows, tokens, kAny});
  check.contiguous("decay_in", a.decay_in, 2);
  if (!check.ok()) return;
  const int64_t heads = a.decay_in.shape[2];
  check.range("decay_in: H", heads, 1, kMaxChannels);
  check.tensor("dt_bias", a.dt_bias, RSSM_FLOAT32, {heads});
  check.contiguous("dt_bias", a.dt_bias, 0);
  check.tensor("decay_out", a.decay_out, RSSM_FLOAT32, {rows, tokens, heads});
  check.contiguous("decay_out", a.decay_out, 0);
  if (gdn) {
    check.tensor("beta_in", a.beta_in, act, {rows, tokens, heads});
    check.contiguous("beta_in", a.beta_in, 2);
    check.tensor("a_log", a.a_log, RSSM_FLOAT32, {heads});
    check.contiguous("a_log", a.a_log, 0);
    check.tensor("beta_out", a.beta_out, RSSM_FLOAT32, {rows, tokens, heads});
    check.contiguous("beta_out", a.beta_out, 0);
  } else if (!(a.dt_low <= a.dt_high)) {
    check.fail(RSSM_INVALID_ARGUMENT, "dt_low, dt_high", "expected dt_low <= dt_high, got %g and %g",
               static_cast<double>(a.dt_low), static_cast<double>(a.dt_high));
  }
}

void addDecay(SsmInputsParams& p, const rssm_ssm_inputs_args& a) {
  p.decay = a.kind == RSSM_GDN ? DecayKind::kGdn : DecayKind::kMamba2;
  p.heads = static_cast<int32_t>(a.decay_in.shape[2]);
  p.dtLow = a.dt_low;
  p.dtHigh = a.dt_high;
  p.decayIn = actTensor(a.decay_in);
  p.dtBias = static_cast<const float*>(a.dt_bias.data);
  p.decayOut = static_cast<float*>(a.decay_out.data);
  if (p.decay == DecayKind::kGdn) {
    p.betaIn = actTensor(a.beta_in);
    p.aLog = static_cast<const float*>(a.a_log.data);
    p.betaOut = static_cast<float*>(a.beta_out.data);
  }
}

cudaError_t launch(SsmInputsParams p, cudaStream_t stream) {
  if (p.rows == 0 || p.tokens == 0) return cudaSuccess;
  const cudaError_t code = findMultiprocessors(p.multiprocessors);
  return code == cudaSuccess ? launchSsmInputs(p, stream) : code;
}

rssm_status conv1d(const char* operation, const rssm_conv1d_args* args, bool prompt, void* stream, rssm_error* error) {
  return checkedCall(
      operation, args, stream, error,
      [prompt](Checker& check, const rssm_conv1d_args& a) { checkConv(check, a, prompt); },
      [prompt](const rssm_conv1d_args& a, cudaStream_t on) { return launch(flatten(a, prompt), on); });
}

void checkInputs(Checker& check, const rssm_ssm_inputs_args& a, bool prompt) {
  checkArguments(check, &a.conv);
  check.range("kind", a.kind, RSSM_MAMBA2, RSSM_GDN);
  if (check.ok()) checkConv(check, a.conv, prompt);
  if (check.ok()) checkDecay(check, a);
}

rssm_status ssmInputs(const char* operation, const rssm_ssm_inputs_args* args, bool prompt, void* stream,
                      rssm_error* error) {
  return checkedCall(
      operation, args, stream, error,
      [prompt](Checker& check, const rssm_ssm_inputs_args& a) { checkInputs(check, a, prompt); },
      [prompt](const rssm_ssm_inputs_args& a, cudaStream_t on) {
        SsmInputsParams p = flatten(a.conv, prompt);
        addDecay(p, a);
        return launch(p, on);
      });
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_conv1d_update(const rssm_conv1d_args* args, void* stream, rssm_error* error) {
  return replayssm::conv1d("rssm_conv1d_update", args, false, stream, error);
}

rssm_status rssm_conv1d_prefill(const rssm_conv1d_args* args, void* stream, rssm_error* error) {
  return replayssm::conv1d("rssm_conv1d_prefill", args, true, stream, error);
}

rssm_status rssm_ssm_inputs_update(const rssm_ssm_inputs_args* args, void* stream, rssm_error* error) {
  return replayssm::ssmInputs("rssm_ssm_inputs_update", args, false, stream, error);
}

rssm_status rssm_ssm_inputs_prefill(const rssm_ssm_inputs_args* args, void* stream, rssm_error* error) {
  return replayssm::ssmInputs("rssm_ssm_inputs_prefill", args, true, stream, error);
}
