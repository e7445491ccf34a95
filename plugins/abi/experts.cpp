// extern "C" face of the routed experts: validate, lay out the workspace, launch plan, products and sum.
#include "replayssm/experts.h"

#include "abi/call.h"
#include "abi/experts_checks.h"

namespace replayssm {
namespace {

constexpr int64_t kAlignment = 256;  // bytes, of the workspace's parts

void checkExperts(Checker& check, const rssm_experts_args& a) {
  check.tensor("x", a.x, RSSM_BFLOAT16, {kAny, kAny});
  check.tensor("ids", a.ids, RSSM_INT32, {a.x.shape[0], kAny});
  if (!check.ok()) return;
  const int64_t experts = a.up.data.rank > 0 ? a.up.data.shape[0] : 0;
  check.range("up: data: E", experts, 1, kMaxExperts);
  check.range("ids: k", a.ids.shape[1], 1, experts < kMaxChoices ? experts : kMaxChoices);
  if (!check.ok()) return;
  check.range("x: N", a.x.shape[0], 0, kMaxPairs / a.ids.shape[1]);
  checkPassTokens(check, a.pass_tokens);
  if (!check.ok()) return;
  checkPacked(check, kUpNames, a.up, experts, 2);
  checkPacked(check, kDownNames, a.down, experts, 1);
  check.range("up: columns", a.up.columns, a.x.shape[1], a.x.shape[1]);
  check.range("down: columns", a.down.columns, a.up.rows, a.up.rows);
  check.tensor("weights", a.weights, RSSM_FLOAT32, {a.x.shape[0], a.ids.shape[1]});
  check.tensor("out", a.out, RSSM_BFLOAT16, {a.x.shape[0], a.down.rows});
  if (check.ok() && a.down.rows % 8 != 0) {
    check.fail(RSSM_INVALID_ARGUMENT, "down: rows", "expected a multiple of 8, got %d", a.down.rows);
  }
  check.contiguous("x", a.x, 1);
  check.aligned("x", a.x);
  check.contiguous("ids", a.ids, 1);
  check.contiguous("weights", a.weights, 1);
  check.contiguous("out", a.out, 1);
  check.aligned("out", a.out);
}

constexpr int kDeepTokens = 32;  // of a pass, from which on the instructions of a warpgroup pay

// Whether the step has tokens enough for the instructions of a warpgroup, and its sizes are whole steps of them.
bool mayBeDeep(const rssm_experts_args& a) {
  const int64_t pairs = a.x.shape[0] * a.ids.shape[1];
  return kDeepBuilt && choosePassTokens(a.pass_tokens, pairs, a.up.data.shape[0]) >= kDeepTokens &&
         a.up.columns % kLayoutColumns == 0 && a.down.columns % kLayoutColumns == 0;
}

// Offsets of everything in the workspace; the only place that knows them.
struct ExpertsWorkspace {
  int64_t entryCount, tickets, entries, rowToken, rowWeight, position, inner, rows, ordered, bytes;

  explicit ExpertsWorkspace(const rssm_experts_args& a) {
    const int64_t pairs = a.x.shape[0] * a.ids.shape[1];
    const int64_t experts = a.up.data.shape[0] < pairs ? a.up.data.shape[0] : pairs;
    const int64_t padded = pairs + experts * (kRowGroup - 1);
    const int64_t passes = experts + pairs / choosePassTokens(a.pass_tokens, pairs, a.up.data.shape[0]);
    int64_t at = 0;
    const auto take = [&at](int64_t bytesTaken) {
      const int64_t offset = at;
      at += ceilDiv(bytesTaken, kAlignment) * kAlignment;
      return offset;
    };
    entryCount = take(sizeof(int32_t));
    tickets = take(2 * sizeof(int32_t));
    entries = take((passes + 1) * static_cast<int64_t>(sizeof(ExpertEntry)));
    rowToken = take(padded * static_cast<int64_t>(sizeof(int32_t)));
    rowWeight = take(padded * static_cast<int64_t>(sizeof(float)));
    position = take(pairs * static_cast<int64_t>(sizeof(int32_t)));
    inner = take(padded * a.up.rows * 2);
    rows = take(padded * a.down.rows * 2);
    ordered = take(mayBeDeep(a) ? a.x.shape[0] * a.up.columns * 2 : 0);
    bytes = at;
  }
};

PlanParams planParams(const rssm_experts_args& a, const ExpertsWorkspace& layout, uint8_t* workspace) {
  PlanParams p{};
  p.ids = static_cast<const int32_t*>(a.ids.data);
  p.weights = static_cast<const float*>(a.weights.data);
  p.idStride = a.ids.stride[0];
  p.weightStride = a.weights.stride[0];
  p.tokens = static_cast<int32_t>(a.x.shape[0]);
  p.topK = static_cast<int32_t>(a.ids.shape[1]);
  p.topKInverse = static_cast<uint32_t>(((uint64_t{1} << 32) + p.topK - 1) / p.topK);
  p.experts = static_cast<int32_t>(a.up.data.shape[0]);
  p.passTokens = choosePassTokens(a.pass_tokens, static_cast<int64_t>(p.tokens) * p.topK, p.experts);
  p.plan.entryCount = reinterpret_cast<int32_t*>(workspace + layout.entryCount);
  p.plan.tickets = reinterpret_cast<int32_t*>(workspace + layout.tickets);
  p.plan.entries = reinterpret_cast<ExpertEntry*>(workspace + layout.entries);
  p.plan.rowToken = reinterpret_cast<int32_t*>(workspace + layout.rowToken);
  p.plan.rowWeight = reinterpret_cast<float*>(workspace + layout.rowWeight);
  p.plan.position = reinterpret_cast<int32_t*>(workspace + layout.position);
  p.programmaticLaunch = (a.flags & RSSM_EXPERTS_PROGRAMMATIC_LAUNCH) != 0;
  return p;
}

// The two products of a layer.
struct Products {
  GroupedParams up, down;

  Products(const rssm_experts_args& a, const ExpertsWorkspace& layout, const PlanParams& plan, uint8_t* workspace)
      : up(groupedParams(a.up)), down(groupedParams(a.down)) {
    up.epilogue = a.up.parts == 2 ? ExpertEpilogue::kSwiglu : ExpertEpilogue::kRelu2;
    up.in = a.x.data;
    up.inStride = a.x.stride[0];
    up.out = workspace + layout.inner;
    up.outStride = a.up.rows;
    up.rowToken = plan.plan.rowToken;
    down.epilogue = ExpertEpilogue::kWeighted;
    down.in = up.out;
    down.inStride = a.up.rows;
    down.out = workspace + layout.rows;
    down.outStride = a.down.rows;
    down.rowWeight = plan.plan.rowWeight;
    up.tickets = plan.plan.tickets;
    down.tickets = plan.plan.tickets + 1;
    down.weightsFirst = true;
    for (GroupedParams* p : {&up, &down}) {
      p->entries = plan.plan.entries;
      p->entryCount = plan.plan.entryCount;
      p->passTokens = plan.passTokens;
      p->programmaticLaunch = true;
    }
  }
};

cudaError_t launchProducts(const Products& p, cudaStream_t stream) {
  const cudaError_t code = launchGrouped(p.up, stream);
  return code == cudaSuccess ? launchGrouped(p.down, stream) : code;
}

// The first product picks ordered tokens and leaves its channels in the order of the second one's steps.
cudaError_t launchDeepProducts(const OrderParams& order, Products p, cudaStream_t stream) {
  cudaError_t code = cudaErrorNotSupported;
  if constexpr (kDeepBuilt) {
    p.up.in = order.out;
    p.up.inStride = order.columns;
    p.up.outStep = stepColumnsOf(p.down.format);
    code = launchDeep(p.up, stream);
    if (code == cudaSuccess) code = launchDeep(p.down, stream);
  }
  return code;
}

// Whether the current device is the one that the instructions of a warpgroup were built for.
cudaError_t queryDeep(bool& deep) {
  int device = 0, major = 0, minor = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code == cudaSuccess) code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (code == cudaSuccess) code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  deep = major == 9 && minor == 0;
  return code;
}

cudaError_t launchAll(const rssm_experts_args& a, uint8_t* workspace, cudaStream_t stream) {
  const ExpertsWorkspace layout(a);
  PlanParams plan = planParams(a, layout, workspace);
  const Products products(a, layout, plan, workspace);
  ReduceParams sum{};
  sum.rows = products.down.out;
  sum.position = plan.plan.position;
  sum.out = a.out.data;
  sum.outStride = a.out.stride[0];
  sum.tokens = plan.tokens;
  sum.topK = plan.topK;
  sum.channels = a.down.rows;
  bool deep = false;
  cudaError_t code = queryDeep(deep);
  deep = deep && mayBeDeep(a);
  if (deep) plan.order = {a.x.data, workspace + layout.ordered, a.x.stride[0], plan.tokens, a.up.columns};
  if (code == cudaSuccess) code = launchPlan(plan, stream);
  if (code != cudaSuccess) return code;
  if (deep) {
    code = launchDeepProducts(plan.order, products, stream);
  } else {
    code = launchProducts(products, stream);
  }
  return code == cudaSuccess ? launchReduce(sum, stream) : code;
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_experts_workspace(const rssm_experts_args* args, size_t* bytes, rssm_error* error) {
  replayssm::Checker check("rssm_experts_workspace", error);
  if (replayssm::checkArguments(check, args)) replayssm::checkExperts(check, *args);
  return replayssm::answerBytes(check, bytes, [&] { return replayssm::ExpertsWorkspace(*args).bytes; });
}

rssm_status rssm_experts(const rssm_experts_args* args, void* workspace, size_t workspace_bytes, void* stream,
                         rssm_error* error) {
  replayssm::Checker check("rssm_experts", error);
  if (replayssm::checkArguments(check, args)) replayssm::checkExperts(check, *args);
  if (!check.ok() || args->x.shape[0] == 0) return check.status();
  const auto needed = static_cast<size_t>(replayssm::ExpertsWorkspace(*args).bytes);
  if (!replayssm::checkWorkspace(check, workspace, workspace_bytes, needed)) {
    return check.status();
  }
  const auto on = static_cast<cudaStream_t>(stream);
  replayssm::checkLaunch(check, replayssm::launchAll(*args, static_cast<uint8_t*>(workspace), on));
  return check.status();
}
