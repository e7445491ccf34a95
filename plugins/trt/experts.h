// The plugin of a layer's routed experts: their weighted sum (rssm_experts) for what MoeRoute chose. Packed weights are
// inputs, never constants: gigabytes that the host maps and uploads once. One of several ranks has a part of the experts,
// counted from 0; ids outside are other ranks' and give no work.
#pragma once

#include "replayssm/experts.h"
#include "trt/plugin.h"

namespace replayssm::trt {

struct MoeExperts {
  static constexpr const char* kName = "MoeExperts";
  struct Config {
    int32_t experts = 0, topK = 0, width = 0, intermediate = 0, gated = 0, weightFormat = 0, activation = 0;
    int32_t x = 0, ids = 0, weights = 0;

    template <class Visitor>
    void visit(Visitor& visitor) {
      visitor.integer("experts", experts, 1, 1024);
      visitor.integer("top_k", topK, 1, 32);
      visitor.integer("width", width, 8, 1 << 24);
      visitor.integer("intermediate", intermediate, 8, 1 << 24);
      visitor.integer("gated", gated, 0, 1);
      visitor.code("weight_format", weightFormat, {RSSM_BFLOAT16, RSSM_FLOAT8_E4M3, RSSM_FLOAT4_E2M1});
      visitor.code("activation", activation, {RSSM_BFLOAT16});
      visitor.integer("x_offset", x, 0, 1 << 24);
      visitor.integer("ids_offset", ids, 0, 1 << 24);
      visitor.integer("weights_offset", weights, 0, 1 << 24);
    }
    bool check(rssm_error& error) const;
  };
  struct Args {
    rssm_tensor x, ids, weights, out;
    rssm_tensor up, up_scale, up_factor, down, down_scale, down_factor;
  };

  static std::vector<Port<Args>> ports(const Config& c) {
    std::vector<Port<Args>> all = {{"x", &Args::x, c.activation, 3, false, {c.x, c.width, 0}},
                                   {"ids", &Args::ids, RSSM_INT32, 3, false, {c.ids, c.topK, 0}},
                                   {"weights", &Args::weights, RSSM_FLOAT32, 3, false, {c.weights, c.topK, 0}}};
    bool scaled = c.weightFormat == RSSM_FLOAT4_E2M1;
    all.push_back({"up", &Args::up, c.weightFormat, 4, false, {}, true});
    if (scaled) all.push_back({"up_scale", &Args::up_scale, RSSM_FLOAT8_E4M3, 4, false, {}, true});
    all.push_back({"up_factor", &Args::up_factor, RSSM_FLOAT32, 3});
    all.push_back({"down", &Args::down, c.weightFormat, 4, false, {}, true});
    if (scaled) all.push_back({"down_scale", &Args::down_scale, RSSM_FLOAT8_E4M3, 4, false, {}, true});
    all.push_back({"down_factor", &Args::down_factor, RSSM_FLOAT32, 3});
    return all;
  }

  static std::vector<Port<Args>> results(const Config& c) {
    return {{"out", &Args::out, c.activation, 3, false, {0, c.width, 0}}};
  }

  static size_t workspaceBytes(const Config& config, Args& args);
  static rssm_status run(const Config& config, Args& args, void* workspace, cudaStream_t stream, rssm_error* error);
};

}  // namespace replayssm::trt
