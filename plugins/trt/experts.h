// The plugin of a layer's routed experts: router logits to chosen experts (rssm_route), then their weighted sum
// (rssm_experts). Packed weights are inputs, never constants: gigabytes that the host maps and uploads once.
#pragma once

#include "replayssm/experts.h"
#include "replayssm/route.h"
#include "trt/plugin.h"

namespace replayssm::trt {

struct MoeExperts {
  static constexpr const char* kName = "MoeExperts";
  struct Config {
    int32_t experts = 0, topK = 0, width = 0, intermediate = 0, gated = 0, weightFormat = 0;
    int32_t router = 0, groups = 0, topkGroup = 0, normTopk = 0, activation = 0, x = 0, logits = 0;
    float scaling = 0;

    template <class Visitor>
    void visit(Visitor& visitor) {
      visitor.integer("experts", experts, 1, 1024);
      visitor.integer("top_k", topK, 1, 32);
      visitor.integer("width", width, 8, 1 << 24);
      visitor.integer("intermediate", intermediate, 8, 1 << 24);
      visitor.integer("gated", gated, 0, 1);
      visitor.code("weight_format", weightFormat, {RSSM_BFLOAT16, RSSM_FLOAT8_E4M3, RSSM_FLOAT4_E2M1});
      visitor.code("router", router, {RSSM_ROUTER_SOFTMAX, RSSM_ROUTER_SIGMOID});
      visitor.integer("groups", groups, 1, 32);
      visitor.integer("topk_group", topkGroup, 1, 32);
      visitor.integer("norm_topk", normTopk, 0, 1);
      visitor.real("scaling", scaling, 0.0f, 65536.0f);
      visitor.code("activation", activation, {RSSM_BFLOAT16});
      visitor.integer("x_offset", x, 0, 1 << 24);
      visitor.integer("logits_offset", logits, 0, 1 << 24);
    }
    bool check(rssm_error& error) const;
  };
  struct Args {
    rssm_tensor x, logits, slot, num_tokens, router_bias, out;
    rssm_tensor up, up_scale, up_factor, down, down_scale, down_factor;
  };
  static constexpr bool kHasResult = true;

  static std::vector<Port<Args>> ports(const Config& c) {
    std::vector<Port<Args>> all = {{"x", &Args::x, c.activation, 3, false, {c.x, c.width, 0}},
                                   {"logits", &Args::logits, RSSM_FLOAT32, 3, false, {c.logits, c.experts, 0}},
                                   {"slot", &Args::slot, RSSM_INT32, 1},
                                   {"num_tokens", &Args::num_tokens, RSSM_INT32, 1},
                                   {"router_bias", &Args::router_bias, RSSM_FLOAT32, 1}};
    bool scaled = c.weightFormat == RSSM_FLOAT4_E2M1;
    all.push_back({"up", &Args::up, c.weightFormat, 4, false, {}, true});
    if (scaled) all.push_back({"up_scale", &Args::up_scale, RSSM_FLOAT8_E4M3, 4, false, {}, true});
    all.push_back({"up_factor", &Args::up_factor, RSSM_FLOAT32, 3});
    all.push_back({"down", &Args::down, c.weightFormat, 4, false, {}, true});
    if (scaled) all.push_back({"down_scale", &Args::down_scale, RSSM_FLOAT8_E4M3, 4, false, {}, true});
    all.push_back({"down_factor", &Args::down_factor, RSSM_FLOAT32, 3});
    return all;
  }

  static Port<Args> result(const Config& c) { return {"out", &Args::out, c.activation, 3, false, {0, c.width, 0}}; }

  static size_t workspaceBytes(const Config& config, Args& args);
  static rssm_status run(const Config& config, Args& args, void* workspace, cudaStream_t stream, rssm_error* error);
};

}  // namespace replayssm::trt
