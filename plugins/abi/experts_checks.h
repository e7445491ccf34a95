// What the routed experts and the packed product share at the boundary: the check of packed weights and the choices that
// follow from sizes alone.
#pragma once

#include "abi/check.h"
#include "kernels/experts/params.h"
#include "replayssm/experts.h"

namespace replayssm {

constexpr int64_t kMaxMatrixAxis = 1 << 24;
constexpr int64_t kMaxPairs = 1 << 26;

struct PackedNames {
  const char *rows, *columns, *parts, *data, *blockScale, *factor;
};

constexpr PackedNames kUpNames = {"up: rows", "up: columns", "up: parts", "up: data", "up: block_scale", "up: factor"};
constexpr PackedNames kDownNames = {"down: rows",        "down: columns",  "down: parts", "down: data",
                                    "down: block_scale", "down: factor"};
constexpr PackedNames kLinearNames = {"weight: rows",        "weight: columns",  "weight: parts", "weight: data",
                                      "weight: block_scale", "weight: factor"};

inline int64_t ceilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t tilesOf(const rssm_packed_weights& w) {
  return ceilDiv(static_cast<int64_t>(w.rows) * w.parts, kTileRows);
}

inline void checkPacked(Checker& check, const PackedNames& names, const rssm_packed_weights& w, int64_t experts,
                        int maxParts) {
  check.range(names.rows, w.rows, 1, kMaxMatrixAxis);
  check.range(names.columns, w.columns, 8, kMaxMatrixAxis);
  check.range(names.parts, w.parts, 1, maxParts);
  if (!check.ok()) return;
  if (w.columns % 8 != 0) {
    check.fail(RSSM_INVALID_ARGUMENT, names.columns, "expected a multiple of 8, got %d", w.columns);
    return;
  }
  if (w.parts == 1 && w.rows % 2 != 0) {
    check.fail(RSSM_INVALID_ARGUMENT, names.rows, "expected an even number, got %d", w.rows);
    return;
  }
  const int32_t dtype = w.data.dtype;
  if (dtype != RSSM_FLOAT4_E2M1 && dtype != RSSM_FLOAT8_E4M3 && dtype != RSSM_BFLOAT16) {
    check.fail(RSSM_INVALID_ARGUMENT, names.data, "expected float4_e2m1, float8_e4m3 or bfloat16, got %s",
               dtypeName(dtype));
    return;
  }
  const int64_t groups = ceilDiv(tilesOf(w), kLayoutTiles), blocks = ceilDiv(w.columns, kLayoutColumns);
  constexpr int64_t kRows = kLayoutTiles * kTileRows;
  check.tensor(names.data, w.data, dtype, {experts, groups, blocks, kRows * kLayoutColumns});
  check.contiguous(names.data, w.data, 0);
  if (dtype == RSSM_FLOAT4_E2M1) {
    check.tensor(names.blockScale, w.block_scale, RSSM_FLOAT8_E4M3, {experts, groups, blocks, kLayoutTiles * kLayoutColumns});
    check.contiguous(names.blockScale, w.block_scale, 0);
  } else if (w.block_scale.data != nullptr) {
    check.fail(RSSM_INVALID_ARGUMENT, names.blockScale, "expected an absent tensor with %s, got one", dtypeName(dtype));
  }
  check.tensor(names.factor, w.factor, RSSM_FLOAT32, {experts, w.parts, kAny});
  if (check.ok() && w.factor.shape[2] != 1 && w.factor.shape[2] != w.rows) {
    check.fail(RSSM_INVALID_ARGUMENT, names.factor, "expected 1 or %d factors a part, got %lld", w.rows,
               static_cast<long long>(w.factor.shape[2]));
  }
  if (check.ok() && (reinterpret_cast<uintptr_t>(w.data.data) % kBulkAlignment != 0 ||
                     reinterpret_cast<uintptr_t>(w.block_scale.data) % kBulkAlignment != 0)) {
    check.fail(RSSM_INVALID_ARGUMENT, names.data, "expected addresses that are multiples of %d bytes, got %p and %p",
               kBulkAlignment, w.data.data, w.block_scale.data);
  }
}

inline void checkPassTokens(Checker& check, int32_t passTokens) {
  if (check.ok() && passTokens != 0 && passTokens != 16 && passTokens != 32 && passTokens != kMaxPassTokens) {
    check.fail(RSSM_INVALID_ARGUMENT, "pass_tokens", "expected 0, 16, 32 or 64, got %d", passTokens);
  }
}

// Tokens of a pass for so many tokens an expert: few leave room for more weights on their way.
inline int32_t choosePassTokens(int32_t wanted, int64_t pairs, int64_t experts) {
  if (wanted != 0) return wanted;
  const int64_t each = ceilDiv(pairs, experts);
  return each <= 6 ? 16 : (each <= 20 ? 32 : kMaxPassTokens);
}

inline WeightFormat formatOf(const rssm_packed_weights& w) {
  if (w.data.dtype == RSSM_FLOAT4_E2M1) return WeightFormat::kNvfp4;
  return w.data.dtype == RSSM_FLOAT8_E4M3 ? WeightFormat::kFp8 : WeightFormat::kBfloat16;
}

// The weights' share of a product's parameters.
inline GroupedParams groupedParams(const rssm_packed_weights& w) {
  GroupedParams p{};
  p.format = formatOf(w);
  p.weights = static_cast<const uint8_t*>(w.data.data);
  p.blockScales = static_cast<const uint8_t*>(w.block_scale.data);
  p.factor = static_cast<const float*>(w.factor.data);
  p.factorExpert = w.factor.stride[0];
  p.factorPart = w.factor.stride[1];
  p.factorRow = w.factor.shape[2] == 1 ? 0 : w.factor.stride[2];
  p.tiles = static_cast<int32_t>(tilesOf(w));
  p.columns = w.columns;
  p.outRows = w.rows;
  return p;
}

}  // namespace replayssm
