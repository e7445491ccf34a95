// A token for each position: one block reads the position's logits as often as its request's settings need, which for an
// argmax is not at all: the scan has read them.
#pragma once

#include "kernels/common/philox.cuh"
#include "kernels/common/programmatic.cuh"
#include "locate.cuh"
#include "search.cuh"

namespace replayssm {

constexpr uint32_t kTokenDomain = 2;  // last counter word of a token's draw

// Which tokens a request may draw: keys above `key`, and those equal to it up to the id `lastTie`; of a weight of at
// least `least`.
struct Filter {
  uint32_t key = 0;
  int32_t lastTie = INT32_MAX;
  float least = 0.0f;
};

struct DrawShared {
  PieceBest best[kDrawWarps];
  union {
    LocateShared locate;
    SearchShared search;
  };
};

struct Best {
  float value, lowest;  // lowest: of the finite ones
  int32_t token;
};

// The largest logit and the lowest id that has it, from what the scan found; NaN is larger than any number.
__device__ __forceinline__ Best bestOf(const DrawParams& p, const LogitRow& row, DrawShared& s) {
  constexpr uint32_t kEveryLane = 0xffffffffu;
  const PieceBest* found = p.found + static_cast<int64_t>(blockIdx.x) * p.pieces;
  PieceBest best{0, UINT32_MAX, INFINITY};
  const auto join = [&best](const PieceBest& other) {
    if (other.key > best.key || (other.key == best.key && other.word < best.word)) {
      best.key = other.key;
      best.word = other.word;
    }
    best.lowest = fminf(best.lowest, other.lowest);
  };
  for (int32_t i = threadIdx.x; i < p.pieces; i += kDrawThreads) join(found[i]);
  const uint32_t top = __reduce_max_sync(kEveryLane, best.key);
  const uint32_t word = __reduce_min_sync(kEveryLane, best.key == top ? best.word : UINT32_MAX);
  const float least = valueOf(__reduce_min_sync(kEveryLane, keyOf(best.lowest)));
  if (threadIdx.x % 32 == 0) s.best[threadIdx.x / 32] = {top, word, least};
  __syncthreads();
  best = s.best[0];
  for (int w = 1; w < kDrawWarps; ++w) join(s.best[w]);
  const auto first = static_cast<int32_t>(best.word) * kWord;
  float x[kWord];
  row.load(first, x);
  int32_t token = first;
#pragma unroll
  for (int i = kWord - 1; i >= 0; --i) {
    if (keyOf(x[i]) == best.key) token = first + i;
  }
  return {valueOf(best.key), best.lowest, token};
}

// What top-k and top-p leave: the filter's key and, among the tokens of that key, how many.
template <class Weight>
__device__ Filter cutOf(const DrawParams& p, int64_t entry, const LogitRow& row, Weight weight, const Best& best,
                        float* sums, DrawShared& s) {
  Filter filter;
  int32_t ties = INT32_MAX, present = 0;  // of the filter's key: to be kept, and in the row
  double total = -1.0;                    // of what top-k leaves; below 0: of the row
  const int64_t k = p.topK[entry];
  if (k > 0 && k < row.vocab) {
    CountGoal goal{static_cast<int32_t>(k)};
    const Cut cut = searchCut(row, weight, goal, best.value, best.lowest, s.search);
    filter.key = cut.key;
    ties = goal.wanted - cut.above.count;
    present = cut.ties;
    total = cut.above.weight + ties * static_cast<double>(weight(valueOf(cut.key)));
  }
  const double share = p.topP[entry];
  if (share < 1.0) {
    WeightGoal goal{share, total, 0.0};
    const Cut cut = searchCut(row, weight, goal, best.value, best.lowest, s.search);
    const double each = weight(valueOf(cut.key));
    const double needed = ceil((goal.wanted - cut.above.weight) / each);  // infinite or no number where each is 0
    const int32_t enough = needed >= 1.0 ? (needed < row.vocab ? static_cast<int32_t>(needed) : INT32_MAX) : 1;
    if (cut.key > filter.key) {
      filter.key = cut.key;
      ties = enough;
      present = cut.ties;
    } else if (cut.key == filter.key) {
      ties = min(ties, enough);
    }
  }
  if (ties < present) {
    const uint32_t key = filter.key;
    const auto isTie = [&](int32_t id, float x) { return id < row.vocab && keyOf(x) == key ? 1.0f : 0.0f; };
    filter.lastTie = locate(row, isTie, [&](double) { return ties - 0.5; }, sums, s.locate);
  }
  filter.least = p.minP[entry];
  return filter;
}

__global__ void __launch_bounds__(kDrawThreads, 2) drawKernel(const __grid_constant__ DrawParams p) {
  extern __shared__ float sums[];  // one a chunk
  __shared__ DrawShared s;
  const int32_t position = blockIdx.x % p.width, line = blockIdx.x / p.width;
  const LogitRow row{p.logits + line * p.rowStride + position * p.positionStride, p.vocab, p.wide};
  waitForPredecessor();
  // HAZARD: an entry out of range would be read as a setting; it becomes the last one, which padding rows have
  const int64_t asked = p.row == nullptr ? -1 : p.row[line];
  const int64_t entry = asked >= 0 && asked < p.entries ? asked : p.entries - 1;
  const Best best = bestOf(p, row, s);
  const float temperature = p.row == nullptr ? 0.0f : p.temperature[entry];
  const bool finite = isfinite(best.value);
  int32_t token = best.token;
  if (finite && temperature > 0.0f) {
    const float top = best.value;
    const float scale = 1.4426950408889634f / temperature;  // finite: temperatures are not below 1e-30
    const auto weight = [=](float x) { return exp2f((x - top) * scale); };
    const Filter filter = cutOf(p, entry, row, weight, best, sums, s);
    const auto kept = [=](int32_t id, float x) {
      const uint32_t key = keyOf(x);
      const float w = weight(x);
      const bool in = key > filter.key || (key == filter.key && id <= filter.lastTie);
      return in && w >= filter.least ? w : 0.0f;
    };
    const auto at = static_cast<uint32_t>(p.length[entry] + position);
    const PhiloxWords words = philox4x32(0, 0, at, kTokenDomain, static_cast<uint64_t>(p.seed[entry]));
    const double u =
        (static_cast<double>(words.word[0] >> 5) * 67108864.0 + static_cast<double>(words.word[1] >> 6)) /
        9007199254740992.0;
    token = locate(row, kept, [=](double total) { return u * total; }, sums, s.locate);
  }
  if (threadIdx.x == 0) {
    p.tokens[blockIdx.x] = min(token, p.vocab - 1);
    p.finite[blockIdx.x] = finite;
  }
}

}  // namespace replayssm
