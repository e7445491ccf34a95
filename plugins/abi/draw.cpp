// extern "C" face of the draw: validate, flatten, launch.
#include "replayssm/draw.h"

#include "abi/alignment.h"
#include "abi/call.h"
#include "kernels/draw/params.h"

namespace replayssm {
namespace {

constexpr int kPiece = 4;  // logits of one 16-byte access
constexpr int64_t kMaxPositions = INT32_MAX;

void checkDraw(Checker& check, const rssm_draw_args& a) {
  check.tensor("logits", a.logits, RSSM_FLOAT32, {kAny, kAny, kAny});
  check.tensor("length", a.length, RSSM_INT64, {kAny});
  if (!check.ok()) return;
  const int64_t* size = a.logits.shape;
  const int64_t entries = a.length.shape[0];
  check.range("logits: V", size[2], 1, kMaxDrawVocab);
  check.range("logits: T", size[1], 0, kMaxPositions);
  check.range("logits: B", size[0], 0, kMaxPositions / (size[1] > 0 ? size[1] : 1));
  check.range("length: S + 1", entries, 1, kMaxPositions);
  check.tensor("row", a.row, RSSM_INT64, {size[0]});
  check.tensor("seed", a.seed, RSSM_INT64, {entries});
  check.tensor("temperature", a.temperature, RSSM_FLOAT32, {entries});
  check.tensor("top_k", a.top_k, RSSM_INT64, {entries});
  check.tensor("top_p", a.top_p, RSSM_FLOAT32, {entries});
  check.tensor("min_p", a.min_p, RSSM_FLOAT32, {entries});
  check.tensor("tokens", a.tokens, RSSM_INT64, {size[0], size[1]});
  check.tensor("finite", a.finite, RSSM_INT32, {size[0], size[1]});
  check.contiguous("logits", a.logits, 2);
  check.contiguous("row", a.row, 0);
  check.contiguous("length", a.length, 0);
  check.contiguous("seed", a.seed, 0);
  check.contiguous("temperature", a.temperature, 0);
  check.contiguous("top_k", a.top_k, 0);
  check.contiguous("top_p", a.top_p, 0);
  check.contiguous("min_p", a.min_p, 0);
  check.contiguous("tokens", a.tokens, 0);
  check.contiguous("finite", a.finite, 0);
}

DrawParams flatten(const rssm_draw_args& a) {
  DrawParams p{};
  p.rows = static_cast<int32_t>(a.logits.shape[0]);
  p.width = static_cast<int32_t>(a.logits.shape[1]);
  p.vocab = static_cast<int32_t>(a.logits.shape[2]);
  p.entries = static_cast<int32_t>(a.length.shape[0]);
  p.wide = p.vocab % kPiece == 0 && areAligned({&a.logits}, 16);
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
  return p;
}

cudaError_t launch(const rssm_draw_args& a, cudaStream_t stream) {
  const DrawParams p = flatten(a);
  return p.rows == 0 || p.width == 0 ? cudaSuccess : launchDraw(p, stream);
}

}  // namespace
}  // namespace replayssm

rssm_status rssm_draw(const rssm_draw_args* args, void* stream, rssm_error* error) {
  return replayssm::checkedCall("rssm_draw", args, stream, error, replayssm::checkDraw, replayssm::launch);
}
