// What a benchmark problem's launch must give, from the bytes stored before it, token by token;
// by no kernel of the library.
#pragma once

#include <cmath>
#include <cstring>

#include "bench/problem.h"
#include "bench/rounding.h"

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

// A sum, and the same sum of its terms' magnitudes.
struct Summed {
  double value, magnitude;
};

// One head's state and the recurrence on it: in double the truth, in float the plain formula, whose loss bounds a
// kernel's.
template <class Real>
struct Head {
  const Shape& shape;
  std::vector<Real> state;
  std::vector<double> magnitudes;  // of the state's terms

  Head(const Shape& s, const float* stored) : shape(s) {
    const int64_t count = static_cast<int64_t>(s.headDim) * s.stateDim;
    state.assign(stored, stored + count);
    for (Real x : state) magnitudes.push_back(std::abs(static_cast<double>(x)));
  }

  void apply(Real decay, const std::vector<Real>& value, const std::vector<Real>& key) {
    for (size_t i = 0; i < state.size(); ++i) {
      const size_t n = static_cast<size_t>(shape.stateDim);
      const Real change = value[i / n] * key[i % n];
      state[i] = decay * state[i] + change;
      magnitudes[i] = static_cast<double>(decay) * magnitudes[i] + std::abs(static_cast<double>(change));
    }
  }

  Real product(size_t p, const std::vector<Real>& vector) const {
    Real sum = 0;
    for (size_t n = 0; n < vector.size(); ++n) sum += state[p * vector.size() + n] * vector[n];
    return sum;
  }

  Summed read(size_t p, const std::vector<Real>& vector) const {
    double magnitude = 0;
    for (size_t n = 0; n < vector.size(); ++n) {
      magnitude += magnitudes[p * vector.size() + n] * std::abs(static_cast<double>(vector[n]));
    }
    return {static_cast<double>(product(p, vector)), magnitude};
  }
};

// How far the corrections of a step's tokens may be from exact ones, because the contract rounds them to float16.
struct Corrections {
  std::vector<std::vector<double>> keys, errors;

  void decay(double factor) {
    for (auto& error : errors) {
      for (double& e : error) e *= factor;
    }
  }

  // How much a read of row p of the state by `vector` may be off.
  double moved(size_t p, const std::vector<double>& vector) const {
    double sum = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      double dot = 0;
      for (size_t n = 0; n < vector.size(); ++n) dot += keys[i][n] * vector[n];
      sum += std::abs(dot) * errors[i][p];
    }
    return sum;
  }

  void append(const std::vector<double>& key, const std::vector<double>& correction, double beta) {
    std::vector<double> error(correction.size());
    for (size_t p = 0; p < error.size(); ++p) {
      error[p] = 0.5 * rounding::step(correction[p], rounding::kFloat16) + beta * moved(p, key);
    }
    keys.push_back(key);
    errors.push_back(error);
  }
};

template <class Real>
std::vector<Real> numbers16(const uint16_t* bits, int count, bool isHalf) {
  std::vector<Real> result(static_cast<size_t>(count));
  for (size_t i = 0; i < result.size(); ++i) result[i] = static_cast<Real>(isHalf ? half(bits[i]) : bfloat(bits[i]));
  return result;
}

template <class Real>
void scale(std::vector<Real>& v, Real factor) {
  for (Real& x : v) x *= factor;
}

template <class Real>
void normalise(std::vector<Real>& v, Real extra) {
  Real squares = static_cast<Real>(1e-6);
  for (Real x : v) squares += x * x;
  scale(v, extra / std::sqrt(squares));
}

// Folds the committed records of one head.
template <class Real>
void replayRecords(const Problem& problem, const Snapshot& in, Head<Real>& state, size_t slot, size_t head, int h) {
  const Shape& s = problem.shape;
  const size_t heads = static_cast<size_t>(s.heads), groups = static_cast<size_t>(s.groups);
  const size_t group = head / (heads / groups), rows = static_cast<size_t>(problem.ringRows);
  for (int j = 0; j < h; ++j) {
    const size_t r = static_cast<size_t>((in.origin[slot] + j) % problem.ringRows);
    const size_t headRow = (slot * heads + head) * rows + r, groupRow = (slot * groups + group) * rows + r;
    const Real number = in.ringDt[headRow];
    auto value = numbers16<Real>(&in.ringValue[headRow * static_cast<size_t>(s.headDim)], s.headDim, problem.gdn());
    auto key = numbers16<Real>(&in.ringKey[groupRow * static_cast<size_t>(s.stateDim)], s.stateDim, false);
    if (problem.gdn()) {
      scale(key, static_cast<Real>(in.ringKeyFactor[groupRow]));
    } else {
      scale(value, number);
    }
    state.apply(std::exp(problem.gdn() ? number : number * static_cast<Real>(in.a[head])), value, key);
  }
}

// Outputs of one token, which is applied, and by how much rounded corrections may move them.
struct TokenOutput {
  std::vector<Summed> out;
  std::vector<double> rounded;
};

template <class Real>
TokenOutput tokenOutput(const Problem& problem, const Snapshot& in, Head<Real>& state, Corrections& corrections,
                        size_t token, size_t head) {
  const Shape& s = problem.shape;
  const size_t heads = static_cast<size_t>(s.heads), groups = static_cast<size_t>(s.groups);
  const size_t headAt = token * heads + head, groupAt = token * groups + head / (heads / groups);
  const size_t dim = static_cast<size_t>(s.headDim), width = static_cast<size_t>(s.stateDim);
  auto value = numbers16<Real>(&in.value[headAt * dim], s.headDim, false);
  auto key = numbers16<Real>(&in.k[groupAt * width], s.stateDim, false);
  auto query = numbers16<Real>(&in.q[groupAt * width], s.stateDim, false);
  const Real number = in.dt[headAt];
  TokenOutput result{std::vector<Summed>(dim), std::vector<double>(dim, 0.0)};
  if (problem.gdn()) {
    const Real beta = in.beta[headAt], decay = std::exp(number);
    normalise(key, Real{1});
    normalise(query, 1 / std::sqrt(static_cast<Real>(s.stateDim)));
    for (size_t p = 0; p < dim; ++p) value[p] = beta * (value[p] - decay * state.product(p, key));
    state.apply(decay, value, key);
    if (!problem.conventional) {
      corrections.decay(decay);
      corrections.append({key.begin(), key.end()}, {value.begin(), value.end()}, beta);
    }
    const std::vector<double> wide(query.begin(), query.end());
    for (size_t p = 0; p < dim; ++p) result.rounded[p] = corrections.moved(p, wide);
  } else {
    const Real skip = in.skip[head];
    for (size_t p = 0; p < dim; ++p) {
      const double part = static_cast<double>(skip * value[p]);
      result.out[p] = {part, std::abs(part)};
    }
    scale(value, number);
    state.apply(std::exp(number * static_cast<Real>(in.a[head])), value, key);
  }
  for (size_t p = 0; p < dim; ++p) {
    const Summed read = state.read(p, query);
    result.out[p] = {result.out[p].value + read.value, result.out[p].magnitude + read.magnitude};
  }
  return result;
}

}  // namespace gate_detail
