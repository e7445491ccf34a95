// The plugin of the causal convolution: a step (rssm_conv1d_update) or a prompt chunk (rssm_conv1d_prefill).
#pragma once

#include "replayssm/conv1d.h"
#include "trt/phase.h"
#include "trt/plugin.h"

namespace replayssm::trt {

struct CausalConv1dReplay {
  static constexpr const char* kName = "CausalConv1dReplay";
  struct Config {
    int32_t channels = 0, kernel = 0, maxStepTokens = 0, layer = 0, activation = 0, x = 0;

    template <class Visitor>
    void visit(Visitor& visitor) {
      visitor.integer("channels", channels, 1, 1 << 24);
      visitor.integer("kernel", kernel, 2, 8);
      visitor.integer("max_step_tokens", maxStepTokens, 1, 16);
      visitor.integer("layer", layer, 0, (1 << 16) - 1);
      visitor.code("activation", activation, {RSSM_FLOAT16, RSSM_BFLOAT16});
      visitor.integer("x_offset", x, 0, 1 << 24);
    }
    bool check(rssm_error&) const { return true; }
  };
  struct Args : rssm_conv1d_args {
    rssm_tensor phase;
  };

  static std::vector<Port<Args>> ports(const Config& c) {
    return {{"x", &Args::x, c.activation, 3, false, {c.x, c.channels, 0}},
            {"slot", &Args::slot, RSSM_INT32, 1},
            {"num_tokens", &Args::num_tokens, RSSM_INT32, 1},
            {"phase", &Args::phase, RSSM_INT32, 1},
            {"cursor_position", &Args::position, RSSM_INT32, 1},
            {"weight", &Args::weight, RSSM_FLOAT32, 3},
            {"bias", &Args::bias, RSSM_FLOAT32, 1},
            {"window", &Args::window, c.activation, 3, true}};
  }

  static std::vector<Port<Args>> results(const Config& c) {
    return {{"out", &Args::out, c.activation, 3, false, {0, c.channels, 0}}};
  }

  static size_t workspaceBytes(const Config&, const Args&) { return 0; }

  static rssm_status run(const Config& c, Args& args, void*, cudaStream_t stream, rssm_error* error) {
    args.struct_size = sizeof(rssm_conv1d_args);
    args.abi_version = RSSM_ABI_VERSION;
    // Checkpoints keep the taps as [channels, 1, kernel].
    args.weight.rank = 2;
    args.weight.shape[1] = args.weight.shape[2];
    args.weight.stride[1] = 1;
    switch (phaseOf(args.phase)) {
      case Phase::kStep:
        if (!stepTokensFit(args.x.shape[1], c.maxStepTokens, *error)) return error->status;
        return rssm_conv1d_update(&args, stream, error);
      case Phase::kPrompt: return rssm_conv1d_prefill(&args, stream, error);
    }
    return refusePhase(args.phase, *error);
  }
};

}  // namespace replayssm::trt
