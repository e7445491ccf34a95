// The plugin of a layer's router: its logits to the chosen experts of every token and their weights (rssm_route).
#pragma once

#include "replayssm/route.h"
#include "trt/plugin.h"

namespace replayssm::trt {

struct MoeRoute {
  static constexpr const char* kName = "MoeRoute";
  struct Config {
    int32_t experts = 0, topK = 0, router = 0, groups = 0, topkGroup = 0, normTopk = 0, logits = 0;
    float scaling = 0;

    template <class Visitor>
    void visit(Visitor& visitor) {
      visitor.integer("experts", experts, 1, 1024);
      visitor.integer("top_k", topK, 1, 32);
      visitor.code("router", router, {RSSM_ROUTER_SOFTMAX, RSSM_ROUTER_SIGMOID});
      visitor.integer("groups", groups, 1, 32);
      visitor.integer("topk_group", topkGroup, 1, 32);
      visitor.integer("norm_topk", normTopk, 0, 1);
      visitor.real("scaling", scaling, 0.0f, 65536.0f);
      visitor.integer("logits_offset", logits, 0, 1 << 24);
    }

    bool check(rssm_error& error) const {
      if (topK > experts) {
        error = failure(RSSM_INVALID_ARGUMENT, "field top_k: expected at most the %d experts, got %d", experts, topK);
      } else if (experts % groups != 0 || (router == RSSM_ROUTER_SOFTMAX && groups != 1)) {
        error = failure(RSSM_INVALID_ARGUMENT,
                        "field groups: expected a divisor of the %d experts, 1 with softmax, got %d", experts, groups);
      } else if (topkGroup > groups) {
        error = failure(RSSM_INVALID_ARGUMENT, "field topk_group: expected at most the %d groups, got %d", groups,
                        topkGroup);
      } else {
        return true;
      }
      return false;
    }
  };
  struct Args : rssm_route_args {};

  static std::vector<Port<Args>> ports(const Config& c) {
    return {{"logits", &Args::logits, RSSM_FLOAT32, 3, false, {c.logits, c.experts, 0}},
            {"slot", &Args::slot, RSSM_INT32, 1},
            {"num_tokens", &Args::num_tokens, RSSM_INT32, 1},
            {"router_bias", &Args::bias, RSSM_FLOAT32, 1}};
  }

  static std::vector<Port<Args>> results(const Config& c) {
    return {{"ids", &Args::ids, RSSM_INT32, 3, false, {0, c.topK, 0}},
            {"weights", &Args::weights, RSSM_FLOAT32, 3, false, {0, c.topK, 0}}};
  }

  static size_t workspaceBytes(const Config&, const Args&) { return 0; }

  static rssm_status run(const Config& c, Args& args, void*, cudaStream_t stream, rssm_error* error) {
    args.struct_size = sizeof(rssm_route_args);
    args.abi_version = RSSM_ABI_VERSION;
    args.router = c.router;
    args.groups = c.groups;
    args.topk_group = c.topkGroup;
    args.norm_topk = c.normTopk;
    args.scaling = c.scaling;
    if (c.router == RSSM_ROUTER_SOFTMAX) args.bias = {};
    args.ids = flatRows(args.ids);
    args.weights = flatRows(args.weights);
    return rssm_route(&args, stream, error);
  }
};

}  // namespace replayssm::trt
