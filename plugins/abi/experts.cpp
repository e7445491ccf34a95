// extern "C" face of the routed experts: validate, lay out the workspace, launch plan, products and sum.
#include "replayssm/experts.h"

#include <cstdlib>
#include <cstring>

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

constexpr int kWideTokens = 64;    // of a pass, from which on the instructions of a warpgroup pay
constexpr int kOrderColumns = 64;  // within which the instructions of a warpgroup want another order

// Whether the step has tokens enough for the instructions of a warpgroup, and its sizes fit them.
bool mayBeWide(const rssm_experts_args& a) {
  const int64_t pairs = a.x.shape[0] * a.ids.shape[1];
  return kWideBuilt && choosePassTokens(a.pass_tokens, pairs, a.up.data.shape[0]) >= kWideTokens &&
         a.up.columns % kOrderColumns == 0 && a.down.columns % kOrderColumns == 0;
}

// Which of the kernels serve, for comparisons: RSSM_EXPERTS=<plan><wide><turns>. plan 0: one block, 1: a cluster of
// blocks. wide 0: tokens copied one by one, 1 and 2: in the order of steps, 12 or 16 warps that multiply, 3: as 2, from
// passes of 32 tokens on. turns: rotations by products (0, 3, 6). A fourth, for times alone: GroupedParams::diagnose.
struct Variant {
  int plan = 1, wide = 2, turns = 0, diagnose = 0;
  Variant() {
    const char* text = std::getenv("RSSM_EXPERTS");
    if (text == nullptr || std::strlen(text) < 3) return;
    plan = text[0] - '0';
    wide = text[1] - '0';
    turns = text[2] - '0';
    if (text[3] != 0) diagnose = text[3] - '0';
  }
};

// Whether tokens may be copied in the order of steps: sizes of whole steps, and the plan that pads experts.
bool mayBeDeep(const rssm_experts_args& a) {
  const Variant variant;
  const int64_t pairs = a.x.shape[0] * a.ids.shape[1];
  const int fewest = variant.wide == 3 ? kWideTokens / 2 : kWideTokens;
  return kWideBuilt && variant.plan == 1 && variant.wide > 0 &&
         choosePassTokens(a.pass_tokens, pairs, a.up.data.shape[0]) >= fewest &&
         a.up.columns % kLayoutColumns == 0 && a.down.columns % kLayoutColumns == 0;
}

constexpr int64_t kRowPadding = kRowGroup - 1;  // rows that an expert's may be padded by

// Offsets of everything in the workspace; the only place that knows them.
struct ExpertsWorkspace {
  int64_t entryCount, entries, rowToken, rowWeight, position, inner, rows, ordered, bytes;

  explicit ExpertsWorkspace(const rssm_experts_args& a) {
    const int64_t pairs = a.x.shape[0] * a.ids.shape[1];
    const int64_t experts = a.up.data.shape[0] < pairs ? a.up.data.shape[0] : pairs;
    const int64_t padded = pairs + experts * kRowPadding;
    const int64_t passes = experts + pairs / choosePassTokens(a.pass_tokens, pairs, a.up.data.shape[0]);
    int64_t at = 0;
    const auto take = [&at](int64_t bytesTaken) {
      const int64_t offset = at;
      at += ceilDiv(bytesTaken, kAlignment) * kAlignment;
      return offset;
    };
    entryCount = take(sizeof(int32_t));
    entries = take((passes + 1) * static_cast<int64_t>(sizeof(ExpertEntry)));
    rowToken = take(padded * static_cast<int64_t>(sizeof(int32_t)));
    rowWeight = take(padded * static_cast<int64_t>(sizeof(float)));
    position = take(pairs * static_cast<int64_t>(sizeof(int32_t)));
    inner = take(padded * a.up.rows * 2);
    rows = take(padded * a.down.rows * 2);
    ordered = take(mayBeDeep(a) ? padded * a.up.columns * 2 : mayBeWide(a) ? a.x.shape[0] * a.up.columns * 2 : 0);
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
  p.plan.entries = reinterpret_cast<ExpertEntry*>(workspace + layout.entries);
  p.plan.rowToken = reinterpret_cast<int32_t*>(workspace + layout.rowToken);
  p.plan.rowWeight = reinterpret_cast<float*>(workspace + layout.rowWeight);
  p.plan.position = reinterpret_cast<int32_t*>(workspace + layout.position);
  p.programmaticLaunch = (a.flags & RSSM_EXPERTS_PROGRAMMATIC_LAUNCH) != 0;
  return p;
}

// The first product reads ordered copies of the tokens and stores its channels in the order that the second wants.
void makeWide(const rssm_experts_args& a, uint8_t* ordered, PlanParams& plan, GroupedParams& up, GroupedParams& down) {
  plan.order = {a.x.data, ordered, a.x.stride[0], a.up.columns};
  up.in = ordered;
  up.inStride = a.up.columns;
  up.wide = up.orderOut = down.wide = true;
}

// Both products read tokens in the order of their steps, which `gather` makes for the first and the first for the second.
void makeDeep(const rssm_experts_args& a, uint8_t* ordered, const PlanParams& plan, GatherParams& gather,
              GroupedParams& up, GroupedParams& down) {
  gather.in = a.x.data;
  gather.out = ordered;
  gather.inStride = a.x.stride[0];
  gather.columns = a.up.columns;
  gather.stepColumns = stepColumnsOf(up.format);
  gather.plan = plan.plan;
  up.in = ordered;
  up.inStride = a.up.columns;
  up.outStep = stepColumnsOf(down.format);
  up.rowWeight = plan.plan.rowWeight;
}

cudaError_t launchAll(const rssm_experts_args& a, uint8_t* workspace, cudaStream_t stream) {
  const ExpertsWorkspace layout(a);
  PlanParams plan = planParams(a, layout, workspace);
  GroupedParams up = groupedParams(a.up);
  up.epilogue = a.up.parts == 2 ? ExpertEpilogue::kSwiglu : ExpertEpilogue::kRelu2;
  up.in = a.x.data;
  up.inStride = a.x.stride[0];
  up.out = workspace + layout.inner;
  up.outStride = a.up.rows;
  up.entries = plan.plan.entries;
  up.entryCount = plan.plan.entryCount;
  up.rowToken = plan.plan.rowToken;
  up.passTokens = plan.passTokens;
  up.programmaticLaunch = true;
  GroupedParams down = groupedParams(a.down);
  down.epilogue = ExpertEpilogue::kWeighted;
  down.in = up.out;
  down.inStride = a.up.rows;
  down.out = workspace + layout.rows;
  down.outStride = a.down.rows;
  down.entries = up.entries;
  down.entryCount = up.entryCount;
  down.rowWeight = plan.plan.rowWeight;
  down.passTokens = plan.passTokens;
  down.weightsFirst = true;
  down.programmaticLaunch = true;
  ReduceParams sum{};
  sum.rows = down.out;
  sum.position = plan.plan.position;
  sum.out = a.out.data;
  sum.outStride = a.out.stride[0];
  sum.tokens = plan.tokens;
  sum.topK = plan.topK;
  sum.channels = a.down.rows;
  int device = 0, major = 0, minor = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code == cudaSuccess) code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (code == cudaSuccess) code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  const Variant variant;
  const bool hopper = major == 9 && minor == 0, deep = hopper && mayBeDeep(a), wide = hopper && mayBeWide(a);
  up.multiplied = down.multiplied = variant.turns;
  up.diagnose = down.diagnose = variant.diagnose;
  GatherParams gather{};
  if (deep) {
    makeDeep(a, workspace + layout.ordered, plan, gather, up, down);
  } else if (wide) {
    makeWide(a, workspace + layout.ordered, plan, up, down);
  }
  if (code == cudaSuccess) code = variant.plan == 1 ? launchClusterPlan(plan, stream) : launchPlan(plan, stream);
  if constexpr (kWideBuilt) {
    if (deep) {
      const int warps = variant.wide == 1 ? 12 : 16;
      if (code == cudaSuccess) code = launchGather(gather, stream);
      if (code == cudaSuccess) code = launchDeep(up, warps, stream);
      if (code == cudaSuccess) code = launchDeep(down, warps, stream);
    }
  }
  if (!deep) {
    if (code == cudaSuccess) code = launchGrouped(up, stream);
    if (code == cudaSuccess) code = launchGrouped(down, stream);
  }
  if (code == cudaSuccess) code = launchReduce(sum, stream);
  return code;
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
