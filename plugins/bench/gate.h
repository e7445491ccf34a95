// Correctness gate of the benchmark: a small batch against the recurrence in float64, outputs and folded states.
#pragma once

#include <cmath>
#include <cstring>

#include "bench/problem.h"

namespace gate_detail {

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
  std::vector<float> dt, a, skip, checkpoint, ringDt;
  std::vector<int32_t> origin, slot;
  explicit Snapshot(const Problem& p)
      : value(download<uint16_t>(p.args.value)), k(download<uint16_t>(p.args.k)), q(download<uint16_t>(p.args.q)),
        ringValue(download<uint16_t>(p.args.ring_value)), ringKey(download<uint16_t>(p.args.ring_k)),
        dt(download<float>(p.args.dt)), a(download<float>(p.args.a)), skip(download<float>(p.args.skip)),
        checkpoint(download<float>(p.args.checkpoint)), ringDt(download<float>(p.args.ring_dt)),
        origin(download<int32_t>(p.args.origin)), slot(download<int32_t>(p.args.slot)) {}
};

// Errors relative to the largest magnitude, over one head.
struct HeadError {
  double output = 0, state = 0;
};

inline void applyRecord(std::vector<double>& state, const Shape& s, double decay, double dt, const uint16_t* x,
                        const uint16_t* k) {
  for (int p = 0; p < s.headDim; ++p) {
    double scaled = dt * bfloat(x[p]);
    for (int n = 0; n < s.stateDim; ++n) {
      double& element = state[static_cast<size_t>(p * s.stateDim + n)];
      element = decay * element + scaled * bfloat(k[n]);
    }
  }
}

inline HeadError compareHead(const Problem& problem, const Snapshot& in, const std::vector<uint16_t>& out,
                             const std::vector<float>& after, int row, int head, int h) {
  const Shape& s = problem.shape;
  const int group = head / (s.heads / s.groups), slot = in.slot[static_cast<size_t>(row)];
  const size_t elems = static_cast<size_t>(s.headDim * s.stateDim);
  const size_t base = (static_cast<size_t>(slot) * s.heads + head) * elems;
  std::vector<double> state(in.checkpoint.begin() + base, in.checkpoint.begin() + base + elems);
  const double a = in.a[head];
  auto apply = [&](double dt, const uint16_t* x, const uint16_t* k) {
    applyRecord(state, s, std::exp(dt * a), dt, x, k);
  };
  for (int j = 0; j < h; ++j) {
    size_t r = static_cast<size_t>((in.origin[slot] + j) % problem.ringRows);
    size_t headRow = (static_cast<size_t>(slot) * s.heads + head) * problem.ringRows + r;
    size_t groupRow = (static_cast<size_t>(slot) * s.groups + group) * problem.ringRows + r;
    apply(in.ringDt[headRow], &in.ringValue[headRow * s.headDim], &in.ringKey[groupRow * s.stateDim]);
  }
  HeadError error;
  double largest = 1e-30;
  if (h + problem.tokens > problem.window) {
    for (size_t i = 0; i < elems; ++i) {
      largest = std::max(largest, std::abs(state[i]));
      error.state = std::max(error.state, std::abs(after[base + i] - state[i]));
    }
    error.state /= largest;
  }
  double worst = 0, scale = 1e-30;
  for (int t = 0; t < problem.tokens; ++t) {
    size_t token = static_cast<size_t>(row) * problem.tokens + t;
    const uint16_t* x = &in.value[(token * s.heads + head) * s.headDim];
    const uint16_t* q = &in.q[(token * s.groups + group) * s.stateDim];
    apply(in.dt[token * s.heads + head], x, &in.k[(token * s.groups + group) * s.stateDim]);
    for (int p = 0; p < s.headDim; ++p) {
      double sum = in.skip[head] * bfloat(x[p]);
      for (int n = 0; n < s.stateDim; ++n) sum += state[static_cast<size_t>(p * s.stateDim + n)] * bfloat(q[n]);
      double got = bfloat(out[(token * s.heads + head) * s.headDim + p]);
      if (!(std::abs(got) < 1e30)) got = 1e30;
      worst = std::max(worst, std::abs(got - sum));
      scale = std::max(scale, std::abs(sum));
    }
  }
  error.output = worst / scale;
  return error;
}

}  // namespace gate_detail

// Throws when the update is wrong at any h of a window; prints the largest errors.
inline void gate(const Shape& shape, int tokens, cudaStream_t stream) {
  using namespace gate_detail;
  constexpr double kStateBound = 2e-6, kOutputBound = 0.00390625;  // one bfloat16 rounding of the largest output
  HeadError worst;
  for (int h : {0, 1, 8, 16 - tokens, 16}) {
    Problem problem(shape, 3, tokens, 16);
    Snapshot before(problem);
    problem.update(0, h, false, stream);
    cudaOk(cudaStreamSynchronize(stream), "gate");
    std::vector<uint16_t> out = download<uint16_t>(problem.args.out);
    std::vector<float> after = download<float>(problem.args.checkpoint);
    for (int head = 0; head < shape.heads; head += 5) {
      HeadError error = compareHead(problem, before, out, after, head % 3, head, h);
      worst.output = std::max(worst.output, error.output);
      worst.state = std::max(worst.state, error.state);
    }
  }
  bool green = worst.output <= kOutputBound && worst.state <= kStateBound;
  std::printf("{\"what\": \"gate\", \"shape\": \"%s\", \"T\": %d, \"output_error\": %.3g, \"state_error\": %.3g, "
              "\"green\": %s}\n",
              shape.name, tokens, worst.output, worst.state, green ? "true" : "false");
  std::fflush(stdout);
  if (!green) throw std::runtime_error("gate failed");
}
