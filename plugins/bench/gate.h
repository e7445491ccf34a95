// Correctness gate of the benchmark: a small batch against the recurrence in float64, outputs and folded states.
#pragma once

#include <cmath>
#include <cstring>

#include "bench/problem.h"

namespace gate_detail {

inline double half(uint16_t bits) {
  double magnitude = (bits & 0x7c00) == 0 ? (bits & 0x3ff) * 0x1p-24
                                          : std::ldexp(1024 + (bits & 0x3ff), ((bits & 0x7c00) >> 10) - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

inline double bfloat(uint16_t bits) {
  uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

template <class T>
std::vector<T> download(const rssm_tensor& t) {
  int64_t count = 1;
  for (int axis = 0; axis < t.rank; ++axis) count *= t.shape[axis];
  std::vector<T> host(static_cast<size_t>(count));
  cudaOk(cudaMemcpy(host.data(), t.data, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "download");
  return host;
}

// Everything the reference reads, copied before the launch.
struct Snapshot {
  std::vector<uint16_t> value, k, q, ringValue, ringKey;
  std::vector<float> dt, a, skip, beta, ringKeyFactor, state, ringDt;  // dt, ringDt: log-decay for GDN
  std::vector<int32_t> origin, slot;
  explicit Snapshot(const Problem& p)
      : value(download<uint16_t>(p.args.value)), k(download<uint16_t>(p.args.k)), q(download<uint16_t>(p.args.q)),
        ringValue(optional<uint16_t>(p.args.ring_value)), ringKey(optional<uint16_t>(p.args.ring_k)),
        dt(download<float>(p.gdn() ? p.args.log_decay : p.args.dt)), a(optional<float>(p.args.a)),
        skip(optional<float>(p.args.skip)), beta(optional<float>(p.args.beta)),
        ringKeyFactor(optional<float>(p.args.ring_key_factor)),
        state(download<float>(p.conventional ? p.states : p.args.checkpoint)),
        ringDt(optional<float>(p.args.ring_dt)), origin(optional<int32_t>(p.args.origin)),
        slot(download<int32_t>(p.args.slot)) {}

  template <class T>
  static std::vector<T> optional(const rssm_tensor& t) {
    return t.data == nullptr ? std::vector<T>() : download<T>(t);
  }
};

// Errors relative to the largest magnitude, over one head.
struct HeadError {
  double output = 0, state = 0;
};

// One head's state in float64 and the recurrence on it.
struct Head {
  const Shape& shape;
  std::vector<double> state;

  void apply(double decay, double weight, const std::vector<double>& value, const std::vector<double>& key) {
    for (int p = 0; p < shape.headDim; ++p) {
      for (int n = 0; n < shape.stateDim; ++n) {
        double& element = state[static_cast<size_t>(p * shape.stateDim + n)];
        element = decay * element + weight * value[static_cast<size_t>(p)] * key[static_cast<size_t>(n)];
      }
    }
  }

  double read(int p, const std::vector<double>& vector) const {
    double sum = 0;
    for (int n = 0; n < shape.stateDim; ++n) {
      sum += state[static_cast<size_t>(p * shape.stateDim + n)] * vector[static_cast<size_t>(n)];
    }
    return sum;
  }
};

inline std::vector<double> numbers16(const uint16_t* bits, int count, bool isHalf) {
  std::vector<double> result(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) result[static_cast<size_t>(i)] = isHalf ? half(bits[i]) : bfloat(bits[i]);
  return result;
}

inline void normalise(std::vector<double>& v, double extra) {
  double squares = 1e-6;
  for (double x : v) squares += x * x;
  for (double& x : v) x *= extra / std::sqrt(squares);
}

// Folds the committed records of one head.
inline void replayRecords(const Problem& problem, const Snapshot& in, Head& state, int slot, int head, int h) {
  const Shape& s = problem.shape;
  const int group = head / (s.heads / s.groups);
  for (int j = 0; j < h; ++j) {
    size_t r = static_cast<size_t>((in.origin[static_cast<size_t>(slot)] + j) % problem.ringRows);
    size_t headRow = (static_cast<size_t>(slot) * s.heads + head) * problem.ringRows + r;
    size_t groupRow = (static_cast<size_t>(slot) * s.groups + group) * problem.ringRows + r;
    double dt = in.ringDt[headRow];
    state.apply(std::exp(problem.gdn() ? dt : dt * in.a[static_cast<size_t>(head)]),
                problem.gdn() ? in.ringKeyFactor[groupRow] : dt,
                numbers16(&in.ringValue[headRow * s.headDim], s.headDim, problem.gdn()),
                numbers16(&in.ringKey[groupRow * s.stateDim], s.stateDim, false));
  }
}

// Applies one token and returns its output.
inline std::vector<double> tokenOutput(const Problem& problem, const Snapshot& in, Head& state, size_t token,
                                       int head) {
  const Shape& s = problem.shape;
  const size_t headAt = token * s.heads + head, groupAt = token * s.groups + head / (s.heads / s.groups);
  std::vector<double> value = numbers16(&in.value[headAt * s.headDim], s.headDim, false);
  std::vector<double> key = numbers16(&in.k[groupAt * s.stateDim], s.stateDim, false);
  std::vector<double> query = numbers16(&in.q[groupAt * s.stateDim], s.stateDim, false);
  std::vector<double> out(static_cast<size_t>(s.headDim), 0.0);
  const double dt = in.dt[headAt];
  if (problem.gdn()) {
    normalise(key, 1.0);
    normalise(query, 1.0 / std::sqrt(s.stateDim));
    for (int p = 0; p < s.headDim; ++p) {
      double& v = value[static_cast<size_t>(p)];
      v = in.beta[headAt] * (v - std::exp(dt) * state.read(p, key));
    }
    state.apply(std::exp(dt), 1.0, value, key);
  } else {
    state.apply(std::exp(dt * in.a[static_cast<size_t>(head)]), dt, value, key);
    const double skip = in.skip[static_cast<size_t>(head)];
    for (int p = 0; p < s.headDim; ++p) out[static_cast<size_t>(p)] = skip * value[static_cast<size_t>(p)];
  }
  for (int p = 0; p < s.headDim; ++p) out[static_cast<size_t>(p)] += state.read(p, query);
  return out;
}

// Largest difference of a stored head, relative to the head's largest value.
inline double stateError(const float* stored, const Head& head) {
  double largest = 1e-30, error = 0;
  for (size_t i = 0; i < head.state.size(); ++i) {
    largest = std::max(largest, std::abs(head.state[i]));
    double difference = std::abs(stored[i] - head.state[i]);
    error = std::max(error, difference < 1e30 ? difference : 1e30);
  }
  return error / largest;
}

inline HeadError compareHead(const Problem& problem, const Snapshot& in, const std::vector<uint16_t>& out,
                             const std::vector<float>& after, int row, int head, int h) {
  const Shape& s = problem.shape;
  const size_t slot = static_cast<size_t>(in.slot[static_cast<size_t>(row)]), heads = static_cast<size_t>(s.heads);
  const size_t elems = static_cast<size_t>(s.headDim * s.stateDim), entries = static_cast<size_t>(problem.entries);
  auto base = [&](size_t entry) { return ((slot * entries + entry) * heads + static_cast<size_t>(head)) * elems; };
  auto first = in.state.begin() + static_cast<int64_t>(base(0));
  Head state{s, std::vector<double>(first, first + static_cast<int64_t>(elems))};
  HeadError error;
  if (!problem.conventional) {
    replayRecords(problem, in, state, static_cast<int>(slot), head, h);
    if (h + problem.tokens > problem.window) error.state = stateError(&after[base(0)], state);
  }
  double worst = 0, scale = 1e-30;
  for (int t = 0; t < problem.tokens; ++t) {
    size_t token = static_cast<size_t>(row) * problem.tokens + t;
    std::vector<double> expected = tokenOutput(problem, in, state, token, head);
    if (problem.conventional) {
      error.state = std::max(error.state, stateError(&after[base(static_cast<size_t>(t + 1) % entries)], state));
    }
    for (int p = 0; p < s.headDim; ++p) {
      double got = bfloat(out[(token * heads + static_cast<size_t>(head)) * static_cast<size_t>(s.headDim) + p]);
      if (!(std::abs(got) < 1e30)) got = 1e30;
      worst = std::max(worst, std::abs(got - expected[static_cast<size_t>(p)]));
      scale = std::max(scale, std::abs(expected[static_cast<size_t>(p)]));
    }
  }
  error.output = worst / scale;
  return error;
}

}  // namespace gate_detail

// Whether a case's kernel is right on a small batch, at several h of its window; prints the largest errors.
inline bool gate(const Shape& shape, const Case& c, cudaStream_t stream) {
  using namespace gate_detail;
  constexpr double kStateBound = 2e-6, kOutputBound = 0.00390625;  // one bfloat16 rounding of the largest output
  HeadError worst;
  std::vector<int> depths{0};
  if (c.operation == Operation::kUpdate) depths = {0, 1, c.window / 2, c.window - c.tokens, c.window};
  for (int rows : {1, 3, 24}) {  // one for each launch choice of the update
    for (int h : depths) {
      Problem problem(shape, c, rows, false);
      Snapshot before(problem);
      problem.run(0, h, false, stream);
      cudaOk(cudaStreamSynchronize(stream), "gate");
      std::vector<uint16_t> out = download<uint16_t>(problem.args.out);
      std::vector<float> after = download<float>(problem.conventional ? problem.states : problem.args.checkpoint);
      for (int head = 0; head < shape.heads; head += 5) {
        HeadError error = compareHead(problem, before, out, after, head % rows, head, h);
        worst.output = std::max(worst.output, error.output);
        worst.state = std::max(worst.state, error.state);
      }
    }
  }
  bool green = worst.output <= kOutputBound && worst.state <= kStateBound;
  std::printf("{\"what\": \"gate\", \"case\": \"%s\", \"output_error\": %.3g, \"state_error\": %.3g, \"green\": %s}\n",
              caseName(shape, c).c_str(), worst.output, worst.state, green ? "true" : "false");
  std::fflush(stdout);
  return green;
}
