#include "trt/experts.h"

#include <algorithm>
#include <stdexcept>

namespace replayssm::trt {
namespace {

// Of rssm_experts: passes are most with the fewest tokens of one; with more, tokens may be copied into the workspace.
constexpr int32_t kPassTokens[] = {16, 32, 64};

rssm_experts_args argumentsOf(const MoeExperts::Config& c, const MoeExperts::Args& a) {
  rssm_experts_args all{};
  all.struct_size = sizeof(all);
  all.abi_version = RSSM_ABI_VERSION;
  all.up = {c.intermediate, c.width, c.gated ? 2 : 1, 0, a.up, a.up_scale, a.up_factor};
  all.down = {c.width, c.intermediate, 1, 0, a.down, a.down_scale, a.down_factor};
  all.x = flatRows(a.x);
  all.ids = flatRows(a.ids);
  all.weights = flatRows(a.weights);
  all.out = flatRows(a.out);
  return all;
}

}  // namespace

bool MoeExperts::Config::check(rssm_error& error) const {
  if (topK > experts) {
    error = failure(RSSM_INVALID_ARGUMENT, "field top_k: expected at most the %d experts, got %d", experts, topK);
  } else if (width % 8 != 0 || intermediate % 8 != 0) {
    error = failure(RSSM_INVALID_ARGUMENT, "field %s: expected a multiple of 8, got %d",
                    width % 8 != 0 ? "width" : "intermediate", width % 8 != 0 ? width : intermediate);
  } else {
    return true;
  }
  return false;
}

size_t MoeExperts::workspaceBytes(const Config& config, Args& args) {
  rssm_experts_args all = argumentsOf(config, args);
  size_t most = 0;
  for (int32_t tokens : kPassTokens) {
    all.pass_tokens = tokens;
    rssm_error error{};
    size_t bytes = 0;
    if (rssm_experts_workspace(&all, &bytes, &error) != RSSM_OK) throw std::runtime_error(error.message);
    most = std::max(most, bytes);
  }
  return most;
}

rssm_status MoeExperts::run(const Config& config, Args& args, void* workspace, cudaStream_t stream, rssm_error* error) {
  rssm_experts_args all = argumentsOf(config, args);
  size_t bytes = 0;
  rssm_status status = rssm_experts_workspace(&all, &bytes, error);
  return status == RSSM_OK ? rssm_experts(&all, workspace, bytes, stream, error) : status;
}

}  // namespace replayssm::trt
