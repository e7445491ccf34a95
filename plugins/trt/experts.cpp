#include "trt/experts.h"

#include <algorithm>
#include <stdexcept>

namespace replayssm::trt {
namespace {

// Of rssm_experts: passes are most with the fewest tokens of one; with the most, tokens may be copied into the workspace.
constexpr int32_t kFewestPassTokens = 16, kMostPassTokens = 64;
constexpr int64_t kAlignment = 256;        // bytes, of the workspace's parts

// [B, T, C] as [B T, C]: rows follow one another at one stride.
rssm_tensor flatten(const rssm_tensor& t) {
  rssm_tensor flat = t;
  flat.rank = 2;
  flat.shape[0] = t.shape[0] * t.shape[1];
  flat.stride[0] = t.stride[1];
  flat.shape[1] = t.shape[2];
  flat.stride[1] = t.stride[2];
  return flat;
}

rssm_tensor choices(int64_t tokens, int32_t topK, int32_t dtype, void* data) {
  rssm_tensor view{};
  view.data = data;
  view.dtype = dtype;
  view.rank = 2;
  view.shape[0] = tokens;
  view.shape[1] = view.stride[0] = topK;
  view.stride[1] = 1;
  return view;
}

int64_t choicesBytes(int64_t tokens, int32_t topK) {
  return (tokens * topK * int64_t{4} + kAlignment - 1) / kAlignment * kAlignment;
}

// Both calls of one layer. The workspace holds ids, then weights, each of choicesBytes, then that of rssm_experts.
struct Calls {
  rssm_route_args route{};
  rssm_experts_args experts{};
  int64_t own;  // bytes before the workspace of rssm_experts

  Calls(const MoeExperts::Config& c, const MoeExperts::Args& a, char* workspace) {
    rssm_tensor x = flatten(a.x);
    int64_t bytes = choicesBytes(x.shape[0], c.topK);
    own = 2 * bytes;
    route.struct_size = sizeof(route);
    route.abi_version = experts.abi_version = RSSM_ABI_VERSION;
    route.router = c.router;
    route.groups = c.groups;
    route.topk_group = c.topkGroup;
    route.norm_topk = c.normTopk;
    route.scaling = c.scaling;
    route.logits = a.logits;
    if (c.router == RSSM_ROUTER_SIGMOID) route.bias = a.router_bias;
    route.slot = a.slot;
    route.num_tokens = a.num_tokens;
    route.ids = experts.ids = choices(x.shape[0], c.topK, RSSM_INT32, workspace);
    route.weights = experts.weights = choices(x.shape[0], c.topK, RSSM_FLOAT32, workspace + bytes);
    experts.struct_size = sizeof(experts);
    experts.up = {c.intermediate, c.width, c.gated ? 2 : 1, 0, a.up, a.up_scale, a.up_factor};
    experts.down = {c.width, c.intermediate, 1, 0, a.down, a.down_scale, a.down_factor};
    experts.x = x;
    experts.out = flatten(a.out);
  }
};

}  // namespace

bool MoeExperts::Config::check(rssm_error& error) const {
  bool softmax = router == RSSM_ROUTER_SOFTMAX;
  if (topK > experts) {
    error = failure(RSSM_INVALID_ARGUMENT, "field top_k: expected at most the %d experts, got %d", experts, topK);
  } else if (experts % groups != 0 || (softmax && groups != 1)) {
    error = failure(RSSM_INVALID_ARGUMENT, "field groups: expected a divisor of the %d experts, 1 with softmax, got %d",
                    experts, groups);
  } else if (topkGroup > groups) {
    error = failure(RSSM_INVALID_ARGUMENT, "field topk_group: expected at most the %d groups, got %d", groups, topkGroup);
  } else if (width % 8 != 0 || intermediate % 8 != 0) {
    error = failure(RSSM_INVALID_ARGUMENT, "field %s: expected a multiple of 8, got %d",
                    width % 8 != 0 ? "width" : "intermediate", width % 8 != 0 ? width : intermediate);
  } else {
    return true;
  }
  return false;
}

size_t MoeExperts::workspaceBytes(const Config& config, Args& args) {
  Calls calls(config, args, static_cast<char*>(args.x.data));
  size_t most = 0;
  for (int32_t tokens : {kFewestPassTokens, kMostPassTokens}) {
    calls.experts.pass_tokens = tokens;
    rssm_error error{};
    size_t bytes = 0;
    if (rssm_experts_workspace(&calls.experts, &bytes, &error) != RSSM_OK) throw std::runtime_error(error.message);
    most = std::max(most, bytes);
  }
  return static_cast<size_t>(calls.own) + most;
}

rssm_status MoeExperts::run(const Config& config, Args& args, void* workspace, cudaStream_t stream, rssm_error* error) {
  Calls calls(config, args, static_cast<char*>(workspace));
  size_t bytes = 0;
  rssm_status status = rssm_experts_workspace(&calls.experts, &bytes, error);
  if (status == RSSM_OK) status = rssm_route(&calls.route, stream, error);
  if (status != RSSM_OK) return status;
  return rssm_experts(&calls.experts, static_cast<char*>(workspace) + calls.own, bytes, stream, error);
}

}  // namespace replayssm::trt
