// extern "C" face of the routing: validate, flatten, launch.
#include "replayssm/route.h"

#include "abi/call.h"
#include "kernels/experts/route.h"

namespace replayssm {
namespace {

constexpr int64_t kMaxTokens = INT32_MAX / kMostChoices;

void checkRows(Checker& check, const rssm_route_args& a) {
  if (a.slot.data == nullptr && a.num_tokens.data == nullptr) return;
  check.tensor("slot", a.slot, RSSM_INT32, {a.logits.shape[0]});
  check.tensor("num_tokens", a.num_tokens, RSSM_INT32, {a.logits.shape[0]});
  check.contiguous("slot", a.slot, 0);
  check.contiguous("num_tokens", a.num_tokens, 0);
}

void checkRoute(Checker& check, const rssm_route_args& a) {
  check.tensor("logits", a.logits, RSSM_FLOAT32, {kAny, kAny, kAny});
  check.range("router", a.router, RSSM_ROUTER_SOFTMAX, RSSM_ROUTER_SIGMOID);
  check.range("norm_topk", a.norm_topk, 0, 1);
  if (!check.ok()) return;
  const int64_t experts = a.logits.shape[2];
  check.range("logits: E", experts, 1, kMostRouteExperts);
  check.range("groups", a.groups, 1, a.router == RSSM_ROUTER_SOFTMAX ? 1 : kMostGroups);
  check.range("topk_group", a.topk_group, 1, a.groups);
  if (check.ok() && experts % a.groups != 0) {
    check.fail(RSSM_INVALID_ARGUMENT, "groups", "expected a divisor of E = %lld, got %d",
               static_cast<long long>(experts), a.groups);
  }
  check.contiguous("logits", a.logits, 2);
  if (!check.ok()) return;
  if (a.logits.shape[1] > 0) check.range("logits: B", a.logits.shape[0], 0, kMaxTokens / a.logits.shape[1]);
  if (a.bias.data != nullptr) {
    if (a.router == RSSM_ROUTER_SOFTMAX) {
      check.fail(RSSM_INVALID_ARGUMENT, "bias", "expected an absent tensor with the softmax router, got one");
    }
    check.tensor("bias", a.bias, RSSM_FLOAT32, {experts});
    check.contiguous("bias", a.bias, 0);
  }
  checkRows(check, a);
  const int64_t tokens = a.logits.shape[0] * a.logits.shape[1];
  check.tensor("ids", a.ids, RSSM_INT32, {tokens, kAny});
  if (!check.ok()) return;
  check.range("ids: k", a.ids.shape[1], 1, experts < kMostChoices ? experts : kMostChoices);
  check.tensor("weights", a.weights, RSSM_FLOAT32, {tokens, a.ids.shape[1]});
  check.contiguous("ids", a.ids, 0);
  check.contiguous("weights", a.weights, 0);
}

RouteParams flatten(const rssm_route_args& a) {
  RouteParams p{};
  p.rows = static_cast<int32_t>(a.logits.shape[0]);
  p.tokens = static_cast<int32_t>(a.logits.shape[1]);
  p.experts = static_cast<int32_t>(a.logits.shape[2]);
  p.topK = static_cast<int32_t>(a.ids.shape[1]);
  p.groups = a.groups;
  p.topkGroup = a.topk_group;
  p.sigmoid = a.router == RSSM_ROUTER_SIGMOID;
  p.normTopk = a.norm_topk != 0;
  p.programmaticLaunch = (a.flags & RSSM_ROUTE_PROGRAMMATIC_LAUNCH) != 0;
  p.scaling = a.scaling;
  p.logits = static_cast<const float*>(a.logits.data);
  p.rowStride = a.logits.stride[0];
  p.tokenStride = a.logits.stride[1];
  p.bias = static_cast<const float*>(a.bias.data);
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.ids = static_cast<int32_t*>(a.ids.data);
  p.weights = static_cast<float*>(a.weights.data);
  return p;
}

cudaError_t launch(const rssm_route_args& a, cudaStream_t stream) {
  const RouteParams p = flatten(a);
  return p.rows == 0 || p.tokens == 0 ? cudaSuccess : launchRoute(p, stream);
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_route(const rssm_route_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_route", args, stream, error, replayssm::checkRoute, replayssm::launch);
}
