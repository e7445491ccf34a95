#include "trt/replay.h"

#include <cuda_runtime_api.h>

#include <stdexcept>

namespace replayssm::trt {

bool ReplayConfig::check(rssm_error& error) const {
  if (maxStepTokens > window) {
    error = failure(RSSM_INVALID_ARGUMENT, "field max_step_tokens: expected T_max <= L, here T_max <= %d, got %d", window,
                    maxStepTokens);
  } else if (heads % groups != 0) {
    error = failure(RSSM_INVALID_ARGUMENT, "field groups: expected a divisor of the %d heads, got %d", heads, groups);
  } else if (recurrence != RSSM_FLOAT32 && rounding != 1) {
    error = failure(RSSM_UNSUPPORTED, "field rounding: a low-precision recurrence is built with stochastic rounding only, "
                    "expected 1, got %d", rounding);
  } else {
    return true;
  }
  return false;
}

void appendStepPorts(std::vector<ReplayPort>& ports) {
  using A = ReplayArgs;
  ports.insert(ports.end(), {{"slot", &A::slot, RSSM_INT32, 1},
                             {"num_tokens", &A::num_tokens, RSSM_INT32, 1},
                             {"row_flags", &A::row_flags, RSSM_INT32, 1},
                             {"carry_index", &A::carry_index, RSSM_INT32, 1},
                             {"phase", &A::phase, RSSM_INT32, 1},
                             {"origin", &A::origin, RSSM_INT32, 1},
                             {"h", &A::h, RSSM_INT32, 1},
                             {"cursor_position", &A::position, RSSM_INT32, 1},
                             {"seed", &A::seed, RSSM_INT64, 1}});
}

void appendStatePorts(const ReplayConfig& config, bool gatedDeltaNet, std::vector<ReplayPort>& ports) {
  using A = ReplayArgs;
  auto state = [&](const char* name, rssm_tensor A::*view, int32_t dtype, int32_t rank) {
    ports.push_back({name, view, dtype, rank, true});
  };
  state("checkpoint", &A::checkpoint, config.recurrence, 4);
  if (config.recurrence == RSSM_FLOAT8_E4M3) state("checkpoint_scale", &A::checkpoint_scale, RSSM_FLOAT32, 4);
  if (config.read != RSSM_NO_DTYPE) state("read", &A::read, config.read, 4);
  if (config.read == RSSM_FLOAT8_E4M3) state("read_scale", &A::read_scale, RSSM_FLOAT32, 4);
  if (config.read == RSSM_FLOAT4_E2M1) {
    state("read_scale", &A::read_scale, RSSM_FLOAT8_E4M3, 4);
    state("read_head_scale", &A::read_head_scale, RSSM_FLOAT32, 2);
  }
  state("ring_value", &A::ring_value, gatedDeltaNet ? RSSM_FLOAT16 : config.activation, 4);
  state("ring_k", &A::ring_k, config.activation, 4);
  state("ring_dt", &A::ring_dt, RSSM_FLOAT32, 3);
  if (gatedDeltaNet) {
    state("ring_key_factor", &A::ring_key_factor, RSSM_FLOAT32, 3);
    if (config.read != RSSM_NO_DTYPE || config.recurrence != RSSM_FLOAT32) {  // a flush re-derives its corrections
      state("ring_v", &A::ring_v, config.activation, 4);
      state("ring_beta", &A::ring_beta, RSSM_FLOAT32, 3);
    }
  }
  state("carry", &A::carry, RSSM_FLOAT32, 4);
}

std::vector<ReplayPort> Mamba2Replay::ports(const Config& c) {
  using A = ReplayArgs;
  std::vector<ReplayPort> ports = {{"x", &A::value, c.activation, 3, false, c.values(c.x)},
                                   {"k", &A::k, c.activation, 3, false, c.keys(c.k)},
                                   {"q", &A::q, c.activation, 3, false, c.keys(c.q)},
                                   {"dt", &A::dt, RSSM_FLOAT32, 3, false, c.perHead(c.dt)}};
  appendStepPorts(ports);
  ports.push_back({"a", &A::a, RSSM_FLOAT32, 1});
  ports.push_back({"skip", &A::skip, RSSM_FLOAT32, 1});
  appendStatePorts(c, false, ports);
  return ports;
}

std::vector<ReplayPort> GatedDeltaNetReplay::ports(const Config& c) {
  using A = ReplayArgs;
  std::vector<ReplayPort> ports = {{"q", &A::q, c.activation, 3, false, c.keys(c.q)},
                                   {"k", &A::k, c.activation, 3, false, c.keys(c.k)},
                                   {"v", &A::value, c.activation, 3, false, c.values(c.v)},
                                   {"log_decay", &A::log_decay, RSSM_FLOAT32, 3, false, c.perHead(c.logDecay)},
                                   {"beta", &A::beta, RSSM_FLOAT32, 3, false, c.perHead(c.beta)}};
  appendStepPorts(ports);
  appendStatePorts(c, true, ports);
  return ports;
}

namespace {

// The workspace of a plugin is not zero, and the update needs it so.
rssm_status runUpdate(rssm_update_args& args, void* workspace, cudaStream_t stream, rssm_error* error) {
  size_t bytes = 0;
  rssm_status status = rssm_update_workspace(&args, &bytes, error);
  if (status != RSSM_OK) return status;
  if (bytes > 0) {
    cudaError_t code = cudaMemsetAsync(workspace, 0, bytes, stream);
    if (code != cudaSuccess) {
      *error = failure(RSSM_CUDA_ERROR, "workspace: %s", cudaGetErrorString(code));
      return error->status;
    }
  }
  return rssm_update(&args, workspace, bytes, stream, error);
}

}  // namespace

namespace {

void fillStep(int32_t kind, const ReplayConfig& config, rssm_update_args& args) {
  args.struct_size = sizeof(rssm_update_args);
  args.abi_version = RSSM_ABI_VERSION;
  args.kind = kind;
  args.window = config.window;
  args.layer = config.layer;
  args.head_offset = config.headOffset;
}

rssm_prefill_args promptArgs(int32_t kind, const ReplayConfig& config, const ReplayArgs& a) {
  rssm_prefill_args p{};
  p.struct_size = sizeof(p);
  p.abi_version = RSSM_ABI_VERSION;
  p.kind = kind;
  p.window = config.window;
  p.layer = config.layer;
  p.head_offset = config.headOffset;
  p.slot = a.slot;
  p.num_tokens = a.num_tokens;
  p.row_flags = a.row_flags;
  p.carry_index = a.carry_index;
  p.origin = a.origin;
  p.h = a.h;
  p.position = a.position;
  p.seed = a.seed;
  p.value = a.value;
  p.k = a.k;
  p.q = a.q;
  p.dt = a.dt;
  p.a = a.a;
  p.skip = a.skip;
  p.log_decay = a.log_decay;
  p.beta = a.beta;
  p.out = a.out;
  p.checkpoint = a.checkpoint;
  p.checkpoint_scale = a.checkpoint_scale;
  p.read = a.read;
  p.read_scale = a.read_scale;
  p.read_head_scale = a.read_head_scale;
  p.ring_value = a.ring_value;
  p.ring_k = a.ring_k;
  p.ring_dt = a.ring_dt;
  p.ring_key_factor = a.ring_key_factor;
  p.ring_v = a.ring_v;
  p.ring_beta = a.ring_beta;
  p.carry = a.carry;
  return p;
}

rssm_status runPrompt(const rssm_prefill_args& args, void* workspace, cudaStream_t stream, rssm_error* error) {
  size_t bytes = 0;
  rssm_status status = rssm_prefill_workspace(&args, &bytes, error);
  return status == RSSM_OK ? rssm_prefill(&args, workspace, bytes, stream, error) : status;
}

}  // namespace

size_t replayWorkspace(int32_t kind, const ReplayConfig& config, ReplayArgs& args) {
  rssm_prefill_args prompt = promptArgs(kind, config, args);
  rssm_error error{};
  size_t bytes = 0;
  if (rssm_prefill_workspace(&prompt, &bytes, &error) != RSSM_OK) throw std::runtime_error(error.message);
  return bytes < RSSM_UPDATE_MAX_WORKSPACE_BYTES ? RSSM_UPDATE_MAX_WORKSPACE_BYTES : bytes;
}

rssm_status runReplay(int32_t kind, const ReplayConfig& config, ReplayArgs& args, void* workspace, cudaStream_t stream,
                      rssm_error* error) {
  switch (phaseOf(args.phase)) {
    case Phase::kStep:
      if (!stepTokensFit(args.value.shape[1], config.maxStepTokens, *error)) return error->status;
      fillStep(kind, config, args);
      return runUpdate(args, workspace, stream, error);
    case Phase::kPrompt: return runPrompt(promptArgs(kind, config, args), workspace, stream, error);
  }
  return refusePhase(args.phase, *error);
}

}  // namespace replayssm::trt
