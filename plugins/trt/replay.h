// The plugins of the two recurrences: a decode or verify step (rssm_update), or a prompt chunk (rssm_prefill), in one
// layer, so that one engine serves both; phase.h tells them apart.
#pragma once

#include "replayssm/prefill.h"
#include "replayssm/update.h"
#include "trt/phase.h"
#include "trt/plugin.h"

namespace replayssm::trt {

// Every tensor of both operations, by its name in the C ABI.
struct ReplayArgs : rssm_update_args {
  rssm_tensor phase;        // [1 or 2] int32, only the extent counts
  rssm_tensor row_flags;    // [B] int32, RSSM_PREFILL_*
  rssm_tensor carry_index;  // [B] int32
  rssm_tensor carry;        // [K, H, P, N] float32
};

using ReplayPort = Port<ReplayArgs>;

struct ReplayConfig {
  int32_t heads = 0, groups = 0, headDim = 0, stateDim = 0;
  int32_t window = 0, maxStepTokens = 0, recurrence = 0, rounding = 0, read = 0, layer = 0, headOffset = 0;
  int32_t activation = 0;

  template <class Visitor>
  void visit(Visitor& visitor) {
    visitor.integer("heads", heads, 1, 4096);
    visitor.integer("groups", groups, 1, 4096);
    visitor.integer("head_dim", headDim, 1, 1024);
    visitor.integer("state_dim", stateDim, 1, 1024);
    visitor.integer("window", window, 1, 64);
    visitor.integer("max_step_tokens", maxStepTokens, 1, 16);
    visitor.code("recurrence", recurrence, {RSSM_FLOAT32, RSSM_FLOAT16, RSSM_FLOAT8_E4M3});
    visitor.integer("rounding", rounding, 0, 1);  // 1: stochastic
    visitor.code("read", read, {RSSM_NO_DTYPE, RSSM_FLOAT16, RSSM_FLOAT8_E4M3, RSSM_FLOAT4_E2M1});
    visitor.integer("layer", layer, 0, (1 << 16) - 1);  // 16 bits of the random key each
    visitor.integer("head_offset", headOffset, 0, (1 << 16) - 1);
    visitor.code("activation", activation, {RSSM_FLOAT16, RSSM_BFLOAT16});
  }

  bool check(rssm_error& error) const;

  Channels values(int32_t offset) const { return {offset, heads, headDim}; }
  Channels keys(int32_t offset) const { return {offset, groups, stateDim}; }
  Channels perHead(int32_t offset) const { return {offset, heads, 0}; }
};

// slot .. seed, then the weights come, then the state.
void appendStepPorts(std::vector<ReplayPort>& ports);
void appendStatePorts(const ReplayConfig& config, bool gatedDeltaNet, std::vector<ReplayPort>& ports);

// The dense output [B, T, H * P].
inline std::vector<ReplayPort> replayResults(const ReplayConfig& config) {
  return {{"out", &ReplayArgs::out, config.activation, 3, false, config.values(0)}};
}

// Bytes for the largest step and the largest prompt chunk of these views.
size_t replayWorkspace(int32_t kind, const ReplayConfig& config, ReplayArgs& args);

rssm_status runReplay(int32_t kind, const ReplayConfig& config, ReplayArgs& args, void* workspace, cudaStream_t stream,
                      rssm_error* error);

struct Mamba2Replay {
  static constexpr const char* kName = "Mamba2Replay";
  struct Config : ReplayConfig {
    int32_t x = 0, k = 0, q = 0, dt = 0;  // first channel of each

    template <class Visitor>
    void visit(Visitor& visitor) {
      ReplayConfig::visit(visitor);
      visitor.integer("x_offset", x, 0, 1 << 24);
      visitor.integer("k_offset", k, 0, 1 << 24);
      visitor.integer("q_offset", q, 0, 1 << 24);
      visitor.integer("dt_offset", dt, 0, 1 << 24);
    }
  };
  using Args = ReplayArgs;

  static std::vector<ReplayPort> ports(const Config& config);
  static std::vector<ReplayPort> results(const Config& config) { return replayResults(config); }
  static size_t workspaceBytes(const Config& config, Args& args) { return replayWorkspace(RSSM_MAMBA2, config, args); }
  static rssm_status run(const Config& config, Args& args, void* workspace, cudaStream_t stream, rssm_error* error) {
    return runReplay(RSSM_MAMBA2, config, args, workspace, stream, error);
  }
};

struct GatedDeltaNetReplay {
  static constexpr const char* kName = "GatedDeltaNetReplay";
  struct Config : ReplayConfig {
    int32_t q = 0, k = 0, v = 0, logDecay = 0, beta = 0;

    template <class Visitor>
    void visit(Visitor& visitor) {
      ReplayConfig::visit(visitor);
      visitor.integer("q_offset", q, 0, 1 << 24);
      visitor.integer("k_offset", k, 0, 1 << 24);
      visitor.integer("v_offset", v, 0, 1 << 24);
      visitor.integer("log_decay_offset", logDecay, 0, 1 << 24);
      visitor.integer("beta_offset", beta, 0, 1 << 24);
    }
  };
  using Args = ReplayArgs;

  static std::vector<ReplayPort> ports(const Config& config);
  static std::vector<ReplayPort> results(const Config& config) { return replayResults(config); }
  static size_t workspaceBytes(const Config& config, Args& args) { return replayWorkspace(RSSM_GDN, config, args); }
  static rssm_status run(const Config& config, Args& args, void* workspace, cudaStream_t stream, rssm_error* error) {
    return runReplay(RSSM_GDN, config, args, workspace, stream, error);
  }
};

}  // namespace replayssm::trt
