// Where a filter cuts a row: the largest key whose tokens, with all better ones, reach a count or a weight.
//
// Passes over the row, seven cuts each, leave a range of keys with few tokens; those are listed and ranked. Sums of the
// list are integers, so that they do not depend on its order.
#pragma once

#include "row.cuh"

namespace replayssm {

constexpr int kCuts = 7;           // keys tried at once
constexpr int kCandidates = 1024;  // tokens of a list
constexpr double kFixed = 1099511627776.0;  // 2^40: steps of a listed weight, which is at most 1

// Tokens from a key on: how many, and their weight.
struct Reach {
  int32_t count;
  double weight;
};

struct SearchShared {
  int32_t count[kDrawWarps][kCuts];
  double weight[kDrawWarps][kCuts];
  Reach total[kCuts];
  uint32_t keys[kCandidates];
  unsigned long long fixed[kCandidates];
  int32_t listed, ties;
  uint32_t key, least;
  Reach above;
};

// The key, the tokens above it, and how many have it.
struct Cut {
  uint32_t key;
  Reach above;
  int32_t ties;
};

// Goals: learn(reach of the whole row) once, then whether a reach is enough.
struct CountGoal {
  int32_t wanted;
  __device__ void learn(const Reach&) {}
  __device__ bool operator()(const Reach& r) const { return r.count >= wanted; }
};
struct WeightGoal {
  double share, total;  // of which the share is wanted; below 0: the row's
  double wanted;
  __device__ void learn(const Reach& row) { wanted = share * (total < 0.0 ? row.weight : total); }
  __device__ bool operator()(const Reach& r) const { return r.weight >= wanted; }
};

// Counts and weights of the tokens from each of kCuts keys on, into s.total.
template <class Weight>
__device__ void reachOf(const LogitRow& row, Weight weight, const uint32_t (&cuts)[kCuts], SearchShared& s) {
  int32_t count[kCuts] = {};
  float sum[kCuts] = {};
  row.forEachChunk([&](int32_t, int32_t first, const float(&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t key = first + i < row.vocab ? keyOf(x[i]) : 0u;
      const float w = weight(x[i]);
#pragma unroll
      for (int c = 0; c < kCuts; ++c) {
        const bool in = key >= cuts[c];
        count[c] += in;
        sum[c] += in ? w : 0.0f;
      }
    }
  });
  const int32_t warp = threadIdx.x / 32;
  __syncthreads();  // earlier uses of the shared memory are over
#pragma unroll
  for (int c = 0; c < kCuts; ++c) {
    const int32_t many = warpSum(count[c]);
    const double heavy = warpSum(static_cast<double>(sum[c]));
    if (threadIdx.x % 32 == 0) s.count[warp][c] = many, s.weight[warp][c] = heavy;
  }
  __syncthreads();
  if (threadIdx.x < kCuts) {
    Reach reach{0, 0.0};
    for (int w = 0; w < kDrawWarps; ++w) {
      reach.count += s.count[w][threadIdx.x];
      reach.weight += s.weight[w][threadIdx.x];
    }
    s.total[threadIdx.x] = reach;
  }
  __syncthreads();
}

// Tokens of the list above a key, and how many have it.
struct Rank {
  int32_t above, ties;
  unsigned long long fixed;
};
__device__ __forceinline__ Rank rankOf(const SearchShared& s, int32_t listed, uint32_t key) {
  Rank rank{0, 0, 0};
  for (int32_t i = 0; i < listed; ++i) {
    const uint32_t other = s.keys[i];
    rank.above += other > key;
    rank.ties += other == key;
    rank.fixed += other > key ? s.fixed[i] : 0ull;
  }
  return rank;
}

// The cut among the tokens with keys in [low, high), at most kCandidates; `above` is what lies from high on.
template <class Weight, class Goal>
__device__ Cut cutOfList(const LogitRow& row, Weight weight, const Goal& goal, uint32_t low, uint32_t high,
                         const Reach& above, SearchShared& s) {
  if (threadIdx.x == 0) s.listed = 0, s.key = 0, s.least = UINT32_MAX;
  __syncthreads();
  row.forEachChunk([&](int32_t, int32_t first, const float(&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t key = first + i < row.vocab ? keyOf(x[i]) : 0u;
      if (key < low || key >= high || key == 0) continue;
      const int32_t place = atomicAdd(&s.listed, 1);
      if (place >= kCandidates) continue;
      s.keys[place] = key;
      s.fixed[place] = static_cast<unsigned long long>(static_cast<double>(weight(x[i])) * kFixed);
    }
  });
  __syncthreads();
  const int32_t listed = min(s.listed, kCandidates);
  for (int32_t i = threadIdx.x; i < listed; i += kDrawThreads) {
    const Rank rank = rankOf(s, listed, s.keys[i]);
    const unsigned long long fixed = rank.fixed + rank.ties * s.fixed[i];
    const Reach reach{above.count + rank.above + rank.ties, above.weight + static_cast<double>(fixed) / kFixed};
    if (goal(reach)) atomicMax(&s.key, s.keys[i]);
    atomicMin(&s.least, s.keys[i]);
  }
  __syncthreads();
  const uint32_t key = s.key != 0 ? s.key : s.least;  // rounding may leave the whole list short of the goal
  for (int32_t i = threadIdx.x; i < listed; i += kDrawThreads) {
    if (s.keys[i] != key) continue;  // tokens of one key write the same
    const Rank rank = rankOf(s, listed, key);
    s.ties = rank.ties;
    s.above = {above.count + rank.above, above.weight + static_cast<double>(rank.fixed) / kFixed};
  }
  __syncthreads();
  return {key, s.above, s.ties};
}

// The largest key from which on the row reaches the goal. best, lowest: the row's largest logit and its lowest finite
// one. Cuts are spread evenly over the values that are left; one halves the keys, so that any row ends soon.
template <class Weight, class Goal>
__device__ Cut searchCut(const LogitRow& row, Weight weight, Goal& goal, float best, float lowest, SearchShared& s) {
  uint32_t low = 0, high = keyOf(best) + 1;
  int32_t from = row.vocab;  // tokens from low on
  Reach above{0, 0.0};
  bool first = true;
  do {
    uint32_t cuts[kCuts];
    const float bottom = low == 0 ? lowest : valueOf(low), top = valueOf(high - 1);
#pragma unroll
    for (int c = 0; c < kCuts; ++c) {
      const float value = bottom + (top - bottom) * (static_cast<float>(c + 1) / (kCuts + 1));
      cuts[c] = min(max(keyOf(value), low), high);
    }
    cuts[kCuts - 1] = low + (high - low) / 2;
    if (first) cuts[0] = 0;
    reachOf(row, weight, cuts, s);
    if (first) goal.learn(s.total[0]);
    first = false;
#pragma unroll
    for (int c = 0; c < kCuts; ++c) {
      const Reach reach = s.total[c];
      if (cuts[c] <= low || cuts[c] >= high) continue;
      if (goal(reach)) {
        low = cuts[c];
        from = reach.count;
      } else {
        high = cuts[c];
        above = reach;
      }
    }
  } while (high - low > 1 && from - above.count > kCandidates);
  if (high - low == 1) return {low, above, from - above.count};
  return cutOfList(row, weight, goal, low, high, above, s);
}

}  // namespace replayssm
