// The plugins of this library, one struct each; plugin.h says what each member means.
#pragma once

#include "replayssm/commit.h"
#include "trt/update_config.h"

namespace replayssm::trt {

// One step of a Mamba-2 layer (rssm_update). Inputs: ports(); output 0: [B, T, H, P]; then the state in place.
struct Mamba2Replay {
  static constexpr const char* kName = "Mamba2Replay";
  using Config = UpdateConfig;
  using Args = rssm_update_args;
  static constexpr int32_t kResult = 6;  // value
  static constexpr rssm_tensor Args::*kResultView = &Args::out;
  static constexpr size_t kWorkspaceBytes = kUpdateWorkspaceBytes;

  static std::vector<UpdatePort> ports(const Config& config);
  static rssm_status run(const Config& config, Args& args, void* workspace, cudaStream_t stream, rssm_error* error) {
    return runUpdate(RSSM_MAMBA2, config, args, workspace, stream, error);
  }
};

// One step of a gated delta rule layer (rssm_update).
struct GatedDeltaNetReplay {
  static constexpr const char* kName = "GatedDeltaNetReplay";
  using Config = UpdateConfig;
  using Args = rssm_update_args;
  static constexpr int32_t kResult = 6;  // value
  static constexpr rssm_tensor Args::*kResultView = &Args::out;
  static constexpr size_t kWorkspaceBytes = kUpdateWorkspaceBytes;

  static std::vector<UpdatePort> ports(const Config& config);
  static rssm_status run(const Config& config, Args& args, void* workspace, cudaStream_t stream, rssm_error* error) {
    return runUpdate(RSSM_GDN, config, args, workspace, stream, error);
  }
};

// Moves the cursors after a step (rssm_commit). `after` is any tensor that the step's last layer produced: without it
// nothing would keep the commit behind the updates that read the cursors.
struct ReplayCommit {
  static constexpr const char* kName = "ReplayCommit";
  struct Config {
    int32_t window = 0, ringRows = 0;

    template <class Visitor>
    void visit(Visitor& visitor) {
      visitor.integer("window", window, 1, 64);
      visitor.integer("ring_rows", ringRows, 2, 80);
    }
    bool check(rssm_error& error) const {
      if (ringRows > window && ringRows <= window + 16) return true;
      error = failure(RSSM_INVALID_ARGUMENT, "field ring_rows: expected L < C <= L + 16 with L = %d, got %d", window,
                      ringRows);
      return false;
    }
  };
  using Args = rssm_commit_args;
  static constexpr int32_t kResult = -1;
  static constexpr size_t kWorkspaceBytes = 0;

  static std::vector<Port<Args>> ports(const Config& config);
  static rssm_status run(const Config& config, Args& args, void*, cudaStream_t stream, rssm_error* error) {
    args.window = config.window;
    args.ring_rows = config.ringRows;
    return rssm_commit(&args, stream, error);
  }
};

}  // namespace replayssm::trt
