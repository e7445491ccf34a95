// The plugin that moves the cursors, once for all layers: after a step (rssm_commit) or a prompt chunk
// (rssm_prefill_commit).
#pragma once

#include "replayssm/commit.h"
#include "replayssm/prefill.h"
#include "trt/phase.h"
#include "trt/plugin.h"

namespace replayssm::trt {

struct ReplayCommit {
  static constexpr const char* kName = "ReplayCommit";
  struct Config {
    int32_t window = 0, maxStepTokens = 0;

    template <class Visitor>
    void visit(Visitor& visitor) {
      visitor.integer("window", window, 1, 64);
      visitor.integer("max_step_tokens", maxStepTokens, 1, 16);
    }
    bool check(rssm_error& error) const {
      if (maxStepTokens <= window) return true;
      error = failure(RSSM_INVALID_ARGUMENT, "field max_step_tokens: expected T_max <= L, here T_max <= %d, got %d", window,
                      maxStepTokens);
      return false;
    }
  };
  struct Args : rssm_commit_args {
    rssm_tensor after;  // any tensor [B, T, ...] of the network's end; its size is read, not its data
    rssm_tensor phase;
  };

  // `after` keeps the commit behind the updates that read the cursors: nothing else would order them.
  static std::vector<Port<Args>> ports(const Config&) {
    return {{"after", &Args::after, RSSM_NO_DTYPE, 3},
            {"slot", &Args::slot, RSSM_INT32, 1},
            {"num_tokens", &Args::num_tokens, RSSM_INT32, 1},
            {"accepted", &Args::accepted, RSSM_INT32, 1},
            {"phase", &Args::phase, RSSM_INT32, 1},
            {"origin", &Args::origin, RSSM_INT32, 1, true},
            {"h", &Args::h, RSSM_INT32, 1, true},
            {"cursor_position", &Args::position, RSSM_INT32, 1, true}};
  }

  static std::vector<Port<Args>> results(const Config&) { return {}; }

  static size_t workspaceBytes(const Config&, const Args&) { return 0; }

  static rssm_status run(const Config& config, Args& args, void*, cudaStream_t stream, rssm_error* error) {
    switch (phaseOf(args.phase)) {
      case Phase::kStep:
        args.struct_size = sizeof(rssm_commit_args);
        args.abi_version = RSSM_ABI_VERSION;
        args.window = config.window;
        args.ring_rows = config.window + config.maxStepTokens;
        return rssm_commit(&args, stream, error);
      case Phase::kPrompt: {
        rssm_prefill_commit_args prompt{};
        prompt.struct_size = sizeof(prompt);
        prompt.abi_version = RSSM_ABI_VERSION;
        prompt.max_tokens = static_cast<int32_t>(args.after.shape[1]);
        prompt.slot = args.slot;
        prompt.num_tokens = args.num_tokens;
        prompt.origin = args.origin;
        prompt.h = args.h;
        prompt.position = args.position;
        return rssm_prefill_commit(&prompt, stream, error);
      }
    }
    return refusePhase(args.phase, *error);
  }
};

}  // namespace replayssm::trt
