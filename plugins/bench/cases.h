// Shapes and cases of the benchmark, from the list that `trtllm-replayssm bench kernel` and the tests read as well.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "replayssm/update.h"

enum class Format { kNone, kFloat32, kFloat16, kFp8, kNvfp4 };
enum class Operation { kUpdate, kConventional, kPrefill };

struct Shape {
  const char* name;
  int kind;  // RSSM_MAMBA2 or RSSM_GDN
  int heads, groups, headDim, stateDim;
};

struct Case {
  const char* suite;
  Operation operation;
  int rows, tokens, window;
  Format recurrence, read;
};

namespace case_list {

constexpr int mamba2 = RSSM_MAMBA2, gdn = RSSM_GDN;
constexpr Operation update = Operation::kUpdate, conventional = Operation::kConventional,
                    prefill = Operation::kPrefill;
constexpr Format none = Format::kNone, float32 = Format::kFloat32, float16 = Format::kFloat16, fp8 = Format::kFp8,
                 nvfp4 = Format::kNvfp4;

#define RSSM_SHAPE(name, kind, heads, groups, headDim, stateDim) {#name, kind, heads, groups, headDim, stateDim},
#define RSSM_CASE(suite, operation, rows, tokens, window, recurrence, read)
inline constexpr Shape kShapes[] = {
#include "kernel_cases.inc"
};
#undef RSSM_SHAPE
#undef RSSM_CASE

#define RSSM_SHAPE(name, kind, heads, groups, headDim, stateDim)
#define RSSM_CASE(suite, operation, rows, tokens, window, recurrence, read) \
  {#suite, operation, rows, tokens, window, recurrence, read},
inline constexpr Case kCases[] = {
#include "kernel_cases.inc"
};
#undef RSSM_SHAPE
#undef RSSM_CASE

}  // namespace case_list

inline const char* formatName(Format format) {
  switch (format) {
    case Format::kFloat32: return "float32";
    case Format::kFloat16: return "float16";
    case Format::kFp8: return "fp8";
    case Format::kNvfp4: return "nvfp4";
    default: return "none";
  }
}

inline const char* operationName(Operation operation) {
  switch (operation) {
    case Operation::kUpdate: return "update";
    case Operation::kPrefill: return "prefill";
    default: return "conventional";
  }
}

// As the Python list names it.
inline std::string caseName(const Shape& shape, const Case& c) {
  std::string formats = formatName(c.recurrence);
  if (c.read != Format::kNone) formats += std::string("-") + formatName(c.read);
  return std::string(shape.name) + "-" + operationName(c.operation) + "-B" + std::to_string(c.rows) + "-T" +
         std::to_string(c.tokens) + "-L" + std::to_string(c.window) + "-" + formats;
}

// The committed records before each step of a steady run, when `accepted` of the tokens are kept each time.
inline std::vector<int> windowCycle(const Case& c, int accepted) {
  if (c.operation != Operation::kUpdate) return {0};
  auto next = [&](int h) { return (h + c.tokens > c.window ? 0 : h) + accepted; };
  int start = 0;
  for (int i = 0; i < 4 * c.window; ++i) start = next(start);
  std::vector<int> cycle{start};
  for (int h = next(start); h != start; h = next(h)) cycle.push_back(h);
  return cycle;
}

inline int64_t stateBytes(const Shape& s, Format format) {
  const int64_t elems = static_cast<int64_t>(s.heads) * s.headDim * s.stateDim;
  const int64_t rows = static_cast<int64_t>(s.heads) * s.headDim;
  switch (format) {
    case Format::kFloat32: return 4 * elems;
    case Format::kFloat16: return 2 * elems;
    case Format::kFp8: return elems + 4 * rows * ((s.stateDim + 127) / 128);
    case Format::kNvfp4: return elems / 2 + rows * (s.stateDim / 16) + 4 * s.heads;
    default: return 0;
  }
}

// Bytes a step of all rows must move: state, h records read, T written, inputs and outputs. A prompt of T tokens reads
// the state and writes every copy.
inline int64_t floorBytes(const Shape& s, const Case& c, int h) {
  const bool gdn = s.kind == RSSM_GDN;
  const int64_t values = static_cast<int64_t>(s.heads) * s.headDim, keys = static_cast<int64_t>(s.groups) * s.stateDim;
  const int64_t io = c.tokens * 2 * (2 * values + 2 * keys + (gdn ? 2 : 1) * s.heads);
  const int64_t recurrence = stateBytes(s, c.recurrence), read = stateBytes(s, c.read);
  if (c.operation == Operation::kConventional) return c.rows * ((1 + c.tokens) * recurrence + io);
  if (c.operation == Operation::kPrefill) return c.rows * (2 * recurrence + read + io);
  const bool rederives = gdn && (c.read != Format::kNone || c.recurrence != Format::kFloat32);
  const int64_t key = 2 * keys + 4 * s.heads + (gdn ? 4 * s.groups : 0), value = 2 * values;
  const int64_t raw = rederives ? 2 * values + 4 * s.heads : 0;
  const bool flush = h + c.tokens > c.window;
  const int64_t state = flush ? 2 * recurrence + read : (read > 0 ? read : recurrence);
  const int64_t ringRead = h * (key + (flush && raw > 0 ? raw : value));
  return c.rows * (state + ringRead + c.tokens * (key + value + raw) + io);
}
