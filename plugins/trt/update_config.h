// The settings that both recurrences share, and the ports that follow from them.
#pragma once

#include "replayssm/update.h"
#include "trt/plugin.h"

namespace replayssm::trt {

using UpdatePort = Port<rssm_update_args>;

struct UpdateConfig {
  int32_t window = 0, maxStepTokens = 0, layer = 0, headOffset = 0;
  Choice activation, recurrence, read;

  template <class Visitor>
  void visit(Visitor& visitor) {
    visitor.integer("window", window, 1, 64);
    visitor.integer("max_step_tokens", maxStepTokens, 1, 16);
    visitor.integer("layer", layer, 0, (1 << 16) - 1);             // 16 bits of the random key each
    visitor.integer("head_offset", headOffset, 0, (1 << 16) - 1);
    visitor.choice("activation", activation, {"bfloat16", "float16"});
    visitor.choice("recurrence", recurrence, {"float32", "float16", "fp8"});
    visitor.choice("read", read, {"none", "float16", "fp8", "nvfp4"});
  }

  bool check(rssm_error& error) const {
    if (maxStepTokens <= window) return true;
    error = failure(RSSM_INVALID_ARGUMENT, "field max_step_tokens: expected T_max <= L, here T_max <= %d, got %d", window,
                    maxStepTokens);
    return false;
  }

  int32_t act() const { return activation.index == 0 ? RSSM_BFLOAT16 : RSSM_FLOAT16; }
  bool separate() const { return read.index != 0; }
  bool rederives() const { return separate() || recurrence.index != 0; }
};

// slot .. seed: the head of every update's inputs.
inline std::vector<UpdatePort> cursorPorts() {
  return {{"slot", &rssm_update_args::slot, RSSM_INT32, 1, false},
          {"num_tokens", &rssm_update_args::num_tokens, RSSM_INT32, 1, false},
          {"origin", &rssm_update_args::origin, RSSM_INT32, 1, false},
          {"h", &rssm_update_args::h, RSSM_INT32, 1, false},
          {"position", &rssm_update_args::position, RSSM_INT32, 1, false},
          {"seed", &rssm_update_args::seed, RSSM_INT64, 1, false}};
}

// The checkpoint copies, each followed by the scales its format has.
inline void appendCheckpoints(const UpdateConfig& config, std::vector<UpdatePort>& ports) {
  constexpr int32_t kRecurrence[] = {RSSM_FLOAT32, RSSM_FLOAT16, RSSM_FLOAT8_E4M3};
  constexpr int32_t kRead[] = {RSSM_NO_DTYPE, RSSM_FLOAT16, RSSM_FLOAT8_E4M3, RSSM_FLOAT4_E2M1};
  int32_t recurrence = kRecurrence[config.recurrence.index], read = kRead[config.read.index];
  ports.push_back({"checkpoint", &rssm_update_args::checkpoint, recurrence, 4, true});
  if (recurrence == RSSM_FLOAT8_E4M3) {
    ports.push_back({"checkpoint_scale", &rssm_update_args::checkpoint_scale, RSSM_FLOAT32, 4, true});
  }
  if (!config.separate()) return;
  ports.push_back({"read", &rssm_update_args::read, read, 4, true});
  if (read == RSSM_FLOAT16) return;
  int32_t scale = read == RSSM_FLOAT8_E4M3 ? RSSM_FLOAT32 : RSSM_FLOAT8_E4M3;
  ports.push_back({"read_scale", &rssm_update_args::read_scale, scale, 4, true});
  if (read == RSSM_FLOAT4_E2M1) {
    ports.push_back({"read_head_scale", &rssm_update_args::read_head_scale, RSSM_FLOAT32, 2, true});
  }
}

// Fills the scalars and runs the step. The workspace of a plugin is not zero, and the library needs it so.
rssm_status runUpdate(int32_t kind, const UpdateConfig& config, rssm_update_args& args, void* workspace,
                      cudaStream_t stream, rssm_error* error);

constexpr size_t kUpdateWorkspaceBytes = RSSM_UPDATE_MAX_WORKSPACE_BYTES;

}  // namespace replayssm::trt
