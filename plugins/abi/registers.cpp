// extern "C" face of a step's registers: validate, flatten, launch.
#include "replayssm/registers.h"

#include <initializer_list>
#include <utility>

#include "abi/call.h"
#include "abi/views.h"
#include "kernels/registers/params.h"

namespace replayssm {
namespace {

constexpr int64_t kMaxCount = 1 << 24;  // rows, slots
constexpr int64_t kMaxWidth = 1 << 10;

void all(Checker& check, std::initializer_list<std::pair<const char*, const rssm_tensor*>> tensors) {
  for (const auto& [name, tensor] : tensors) check.contiguous(name, *tensor, 0);
}

void checkSizes(Checker& check, int64_t rows, int64_t width, int64_t entries, const rssm_tensor& draft) {
  check.range("slot: B", rows, 0, kMaxCount);
  check.range("ids: T", width, 1, kMaxWidth);
  check.range("last: S + 1", entries, 1, kMaxCount);
  check.tensor("draft", draft, RSSM_INT64, {entries, kAny});
  if (check.ok()) check.range("draft: D", draft.shape[1], width - 1, kMaxWidth);
}

void checkInputs(Checker& check, const rssm_step_inputs_args& a) {
  check.tensor("slot", a.slot, RSSM_INT32, {kAny});
  check.tensor("ids", a.ids, RSSM_INT64, {a.slot.shape[0], kAny});
  check.tensor("last", a.last, RSSM_INT64, {kAny});
  if (!check.ok()) return;
  const int64_t rows = a.slot.shape[0], entries = a.last.shape[0];
  checkSizes(check, rows, a.ids.shape[1], entries, a.draft);
  check.tensor("room", a.room, RSSM_INT64, {entries});
  check.tensor("draft_count", a.draft_count, RSSM_INT64, {entries});
  check.tensor("num_tokens", a.num_tokens, RSSM_INT32, {rows});
  check.tensor("row", a.row, RSSM_INT64, {rows});
  all(check, {{"slot", &a.slot}, {"last", &a.last}, {"room", &a.room}, {"draft", &a.draft},
              {"draft_count", &a.draft_count}, {"ids", &a.ids}, {"num_tokens", &a.num_tokens}, {"row", &a.row}});
}

StepInputsParams flatten(const rssm_step_inputs_args& a) {
  StepInputsParams p{};
  p.rows = static_cast<int32_t>(a.slot.shape[0]);
  p.width = static_cast<int32_t>(a.ids.shape[1]);
  p.slots = static_cast<int32_t>(a.last.shape[0]) - 1;
  p.drafts = static_cast<int32_t>(a.draft.shape[1]);
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.last = static_cast<const int64_t*>(a.last.data);
  p.room = static_cast<const int64_t*>(a.room.data);
  p.draft = static_cast<const int64_t*>(a.draft.data);
  p.draftCount = static_cast<const int64_t*>(a.draft_count.data);
  p.ids = static_cast<int64_t*>(a.ids.data);
  p.numTokens = static_cast<int32_t*>(a.num_tokens.data);
  p.row = static_cast<int64_t*>(a.row.data);
  return p;
}

void checkOutcome(Checker& check, const rssm_step_outcome_args& a) {
  check.tensor("slot", a.slot, RSSM_INT32, {kAny});
  check.tensor("tokens", a.tokens, RSSM_INT64, {a.slot.shape[0], kAny});
  check.tensor("last", a.last, RSSM_INT64, {kAny});
  if (!check.ok()) return;
  const int64_t rows = a.slot.shape[0], width = a.tokens.shape[1], entries = a.last.shape[0];
  checkSizes(check, rows, width, entries, a.draft);
  check.tensor("num_tokens", a.num_tokens, RSSM_INT32, {rows});
  check.tensor("finite", a.finite, RSSM_INT32, {rows, width});
  if (!isAbsent(a.count)) check.tensor("count", a.count, RSSM_INT64, {rows});
  check.tensor("stop_ids", a.stop_ids, RSSM_INT64, {entries, kAny});
  if (check.ok()) check.range("stop_ids: K", a.stop_ids.shape[1], 0, kMaxWidth);
  check.tensor("length", a.length, RSSM_INT64, {entries});
  check.tensor("room", a.room, RSSM_INT64, {entries});
  if (!isAbsent(a.history)) check.tensor("history", a.history, RSSM_INT64, {entries, kAny});
  check.tensor("emitted", a.emitted, RSSM_INT32, {rows});
  check.tensor("report", a.report, RSSM_INT64, {rows, width + kReportExtra});
  all(check, {{"slot", &a.slot}, {"num_tokens", &a.num_tokens}, {"tokens", &a.tokens}, {"finite", &a.finite},
              {"draft", &a.draft}, {"stop_ids", &a.stop_ids}, {"last", &a.last}, {"length", &a.length},
              {"room", &a.room}, {"emitted", &a.emitted}, {"report", &a.report}});
  if (!isAbsent(a.count)) check.contiguous("count", a.count, 0);
  if (!isAbsent(a.history)) check.contiguous("history", a.history, 0);
}

StepOutcomeParams flatten(const rssm_step_outcome_args& a) {
  StepOutcomeParams p{};
  p.rows = static_cast<int32_t>(a.slot.shape[0]);
  p.width = static_cast<int32_t>(a.tokens.shape[1]);
  p.slots = static_cast<int32_t>(a.last.shape[0]) - 1;
  p.drafts = static_cast<int32_t>(a.draft.shape[1]);
  p.stops = static_cast<int32_t>(a.stop_ids.shape[1]);
  p.positions = isAbsent(a.history) ? 0 : a.history.shape[1];
  p.slot = static_cast<const int32_t*>(a.slot.data);
  p.numTokens = static_cast<const int32_t*>(a.num_tokens.data);
  p.tokens = static_cast<const int64_t*>(a.tokens.data);
  p.finite = static_cast<const int32_t*>(a.finite.data);
  p.count = static_cast<const int64_t*>(a.count.data);
  p.draft = static_cast<const int64_t*>(a.draft.data);
  p.stopIds = static_cast<const int64_t*>(a.stop_ids.data);
  p.last = static_cast<int64_t*>(a.last.data);
  p.length = static_cast<int64_t*>(a.length.data);
  p.room = static_cast<int64_t*>(a.room.data);
  p.history = static_cast<int64_t*>(a.history.data);
  p.emitted = static_cast<int32_t*>(a.emitted.data);
  p.report = static_cast<int64_t*>(a.report.data);
  return p;
}

void checkLookup(Checker& check, const rssm_prompt_lookup_args& a) {
  check.range("max_ngram", a.max_ngram, 1, kMaxCount);
  check.tensor("row", a.row, RSSM_INT64, {kAny});
  check.tensor("history", a.history, RSSM_INT64, {kAny, kAny});
  if (!check.ok()) return;
  const int64_t entries = a.history.shape[0];
  check.range("row: B", a.row.shape[0], 0, kMaxCount);
  check.range("history: S + 1", entries, 1, kMaxCount);
  check.range("history: M", a.history.shape[1], 1, INT32_MAX);
  check.tensor("length", a.length, RSSM_INT64, {entries});
  check.tensor("room", a.room, RSSM_INT64, {entries});
  check.tensor("draft", a.draft, RSSM_INT64, {entries, kAny});
  if (check.ok()) check.range("draft: D", a.draft.shape[1], 1, kMaxWidth);
  check.tensor("draft_count", a.draft_count, RSSM_INT64, {entries});
  all(check, {{"row", &a.row}, {"length", &a.length}, {"room", &a.room}, {"history", &a.history}, {"draft", &a.draft},
              {"draft_count", &a.draft_count}});
}

PromptLookupParams flatten(const rssm_prompt_lookup_args& a) {
  PromptLookupParams p{};
  p.rows = static_cast<int32_t>(a.row.shape[0]);
  p.entries = static_cast<int32_t>(a.history.shape[0]);
  p.drafts = static_cast<int32_t>(a.draft.shape[1]);
  p.maxNgram = a.max_ngram;
  p.positions = a.history.shape[1];
  p.row = static_cast<const int64_t*>(a.row.data);
  p.length = static_cast<const int64_t*>(a.length.data);
  p.room = static_cast<const int64_t*>(a.room.data);
  p.history = static_cast<const int64_t*>(a.history.data);
  p.draft = static_cast<int64_t*>(a.draft.data);
  p.draftCount = static_cast<int64_t*>(a.draft_count.data);
  return p;
}

template <class Args, class Check, class Launch>
rssm_status call(const char* operation, const Args* args, void* stream, rssm_error* error, Check checkArgs,
                 Launch launch) {
  return checkedCall(operation, args, stream, error, checkArgs, [launch](const Args& a, cudaStream_t on) {
    const auto p = flatten(a);
    return p.rows == 0 ? cudaSuccess : launch(p, on);
  });
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_step_inputs(const rssm_step_inputs_args* args, void* stream, rssm_error* error) {
  return replayssm::call("rssm_step_inputs", args, stream, error, replayssm::checkInputs, replayssm::launchStepInputs);
}

rssm_status rssm_step_outcome(const rssm_step_outcome_args* args, void* stream, rssm_error* error) {
  return replayssm::call("rssm_step_outcome", args, stream, error, replayssm::checkOutcome,
                         replayssm::launchStepOutcome);
}

rssm_status rssm_prompt_lookup(const rssm_prompt_lookup_args* args, void* stream, rssm_error* error) {
  return replayssm::call("rssm_prompt_lookup", args, stream, error, replayssm::checkLookup,
                         replayssm::launchPromptLookup);
}
