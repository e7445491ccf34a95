// extern "C" face of the draw: validate, flatten, lay out the workspace, launch.
#include "replayssm/draw.h"

#include "abi/alignment.h"
#include "abi/call.h"
#include "abi/views.h"
#include "kernels/draw/params.h"

namespace replayssm {
namespace {

constexpr int64_t kMaxPositions = INT32_MAX;

void checkSettings(Checker& check, const rssm_draw_args& a) {
  check.tensor("length", a.length, RSSM_INT64, {kAny});
  if (!check.ok()) return;
  const int64_t entries = a.length.shape[0];
  check.range("length: S + 1", entries, 1, kMaxPositions);
  check.tensor("row", a.row, RSSM_INT64, {a.logits.shape[0]});
  check.tensor("seed", a.seed, RSSM_INT64, {entries});
  check.tensor("temperature", a.temperature, RSSM_FLOAT32, {entries});
  check.tensor("top_k", a.top_k, RSSM_INT64, {entries});
  check.tensor("top_p", a.top_p, RSSM_FLOAT32, {entries});
  check.tensor("min_p", a.min_p, RSSM_FLOAT32, {entries});
  check.contiguous("row", a.row, 0);
  check.contiguous("length", a.length, 0);
  check.contiguous("seed", a.seed, 0);
  check.contiguous("temperature", a.temperature, 0);
  check.contiguous("top_k", a.top_k, 0);
  check.contiguous("top_p", a.top_p, 0);
  check.contiguous("min_p", a.min_p, 0);
}

// Whether the call has no settings: none at all.
bool isArgmax(const rssm_draw_args& a) {
  return isAbsent(a.row) && isAbsent(a.length) && isAbsent(a.seed) && isAbsent(a.temperature) && isAbsent(a.top_k) &&
         isAbsent(a.top_p) && isAbsent(a.min_p);
}

void checkDraw(Checker& check, const rssm_draw_args& a) {
  check.tensor("logits", a.logits, RSSM_FLOAT32, {kAny, kAny, kAny});
  if (!check.ok()) return;
  const int64_t* size = a.logits.shape;
  check.range("logits: V", size[2], 1, kMaxDrawVocab);
  check.range("logits: T", size[1], 0, kMaxPositions);
  check.range("logits: B", size[0], 0, kMaxPositions / (size[1] > 0 ? size[1] : 1));
  check.contiguous("logits", a.logits, 2);
  if (!isArgmax(a)) checkSettings(check, a);
  check.tensor("tokens", a.tokens, RSSM_INT64, {size[0], size[1]});
  check.tensor("finite", a.finite, RSSM_INT32, {size[0], size[1]});
  check.contiguous("tokens", a.tokens, 0);
  check.contiguous("finite", a.finite, 0);
}

DrawParams flatten(const rssm_draw_args& a) {
  DrawParams p{};
  p.rows = static_cast<int32_t>(a.logits.shape[0]);
  p.width = static_cast<int32_t>(a.logits.shape[1]);
  p.vocab = static_cast<int32_t>(a.logits.shape[2]);
  p.entries = static_cast<int32_t>(isAbsent(a.length) ? 0 : a.length.shape[0]);
  p.wide = p.vocab % kWord == 0 && areAligned({&a.logits}, 16);
  p.logits = static_cast<const float*>(a.logits.data);
  p.row = static_cast<const int64_t*>(a.row.data);
  p.length = static_cast<const int64_t*>(a.length.data);
  p.seed = static_cast<const int64_t*>(a.seed.data);
  p.temperature = static_cast<const float*>(a.temperature.data);
  p.topK = static_cast<const int64_t*>(a.top_k.data);
  p.topP = static_cast<const float*>(a.top_p.data);
  p.minP = static_cast<const float*>(a.min_p.data);
  p.tokens = static_cast<int64_t*>(a.tokens.data);
  p.finite = static_cast<int32_t*>(a.finite.data);
  p.rowStride = a.logits.stride[0];
  p.positionStride = a.logits.stride[1];
  p.turns = scanTurns(int64_t{p.rows} * p.width, p.vocab);
  p.pieces = scanPieces(p.vocab, p.turns);
  return p;
}

size_t workspaceBytes(const DrawParams& p) {
  return static_cast<size_t>(p.rows) * p.width * p.pieces * sizeof(PieceBest);
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_draw_workspace(const rssm_draw_args* args, size_t* bytes, rssm_error* error) {
  using namespace replayssm;
  Checker check("rssm_draw_workspace", error);
  if (checkArguments(check, args)) checkDraw(check, *args);
  return answerBytes(check, bytes, [&] { return workspaceBytes(flatten(*args)); });
}

rssm_status rssm_draw(const rssm_draw_args* args, void* workspace, size_t workspace_bytes, void* stream,
                      rssm_error* error) {
  using namespace replayssm;
  Checker check("rssm_draw", error);
  if (checkArguments(check, args)) checkDraw(check, *args);
  if (!check.ok()) return check.status();
  DrawParams p = flatten(*args);
  const size_t needed = workspaceBytes(p);
  checkWorkspace(check, workspace, workspace_bytes, needed);
  if (!check.ok() || needed == 0) return check.status();
  p.found = static_cast<PieceBest*>(workspace);
  checkLaunch(check, launchDraw(p, static_cast<cudaStream_t>(stream)));
  return check.status();
}
