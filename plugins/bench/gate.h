// Correctness gate of the benchmark: a small batch against the recurrence in float64, outputs and folded states.
// How far a result may be off: rounding.h.
#pragma once

#include "bench/truth.h"

namespace gate_detail {

// Largest difference of a head's state from the truth, relative to the head's largest value. NaN counts as infinite.
template <class Real>
double stateError(const Real* found, const Head<double>& truth) {
  double largest = 1e-30, error = 0;
  for (size_t i = 0; i < truth.state.size(); ++i) {
    largest = std::max(largest, std::abs(truth.state[i]));
    const double difference = std::abs(static_cast<double>(found[i]) - truth.state[i]);
    error = std::max(error, difference < 1e30 ? difference : 1e30);
  }
  return error / largest;
}

// What the heads of one launch were found to be off by, and what plain float32 loses on them.
struct Launch {
  struct Output {
    double error, exact, magnitude, rounded;
  };
  std::vector<Output> outputs;
  double outputError = 0, stateError = 0;  // relative to the head's largest value
  double outputLost = 0, stateLost = 0;

  // Largest error over its bound; at most 1 where all is right.
  double outputShare() const {
    double share = 0;
    for (const Output& o : outputs) {
      share = std::max(share, o.error / rounding::outputBound(o.exact, o.magnitude, rounding::kBfloat16, outputLost,
                                                              o.rounded));
    }
    return share;
  }
  double stateShare() const { return stateError / rounding::stateBound(stateLost); }
};

inline void compareHead(Launch& launch, const Problem& problem, const Snapshot& in, const std::vector<uint16_t>& out,
                        const std::vector<float>& after, size_t row, size_t head, int h) {
  const Shape& s = problem.shape;
  const size_t slot = static_cast<size_t>(in.slot[row]), heads = static_cast<size_t>(s.heads);
  const size_t dim = static_cast<size_t>(s.headDim), elems = dim * static_cast<size_t>(s.stateDim);
  const size_t entries = static_cast<size_t>(problem.entries), tokens = static_cast<size_t>(problem.tokens);
  auto base = [&](size_t entry) { return ((slot * entries + entry) * heads + head) * elems; };
  Head<double> truth(s, &in.state[base(0)]);
  Head<float> plain(s, &in.state[base(0)]);
  auto compareState = [&](size_t entry) {
    launch.stateError = std::max(launch.stateError, stateError(&after[base(entry)], truth));
    launch.stateLost = std::max(launch.stateLost, stateError(plain.state.data(), truth));
  };
  if (!problem.conventional) {
    replayRecords(problem, in, truth, slot, head, h);
    replayRecords(problem, in, plain, slot, head, h);
    if (h + problem.tokens > problem.window) compareState(0);
  }
  Corrections corrections, unused;
  double worst = 0, largest = 1e-30;
  for (size_t t = 0; t < tokens; ++t) {
    const size_t token = row * tokens + t;
    const TokenOutput expected = tokenOutput(problem, in, truth, corrections, token, head);
    const TokenOutput single = tokenOutput(problem, in, plain, unused, token, head);
    if (problem.conventional) compareState((t + 1) % entries);
    for (size_t p = 0; p < dim; ++p) {
      const auto [exact, magnitude] = expected.out[p];
      double error = std::abs(bfloat(out[(token * heads + head) * dim + p]) - exact);
      if (!(error < 1e30)) error = 1e30;
      launch.outputs.push_back({error, exact, magnitude, expected.rounded[p]});
      const double lost = std::abs(single.out[p].value - exact) / std::max(magnitude, 1e-300);
      launch.outputLost = std::max(launch.outputLost, lost);
      worst = std::max(worst, error);
      largest = std::max(largest, std::abs(exact));
    }
  }
  launch.outputError = std::max(launch.outputError, worst / largest);
}

}  // namespace gate_detail

// Whether a case's kernel is right on a small batch, at several h of its window; prints the largest errors.
inline bool gate(const Shape& shape, const Case& c, uint32_t flags, cudaStream_t stream) {
  using namespace gate_detail;
  double output = 0, state = 0, outputShare = 0, stateShare = 0;
  std::vector<int> depths{0};
  if (c.operation == Operation::kUpdate) depths = {0, 1, c.window / 2, c.window - c.tokens, c.window};
  for (int rows : {1, 3, 24}) {  // one for each launch choice of the update
    for (int h : depths) {
      Problem problem(shape, c, rows, false);
      Snapshot before(problem);
      problem.run(0, h, flags, stream);
      cudaOk(cudaStreamSynchronize(stream), "gate");
      std::vector<uint16_t> out = download<uint16_t>(problem.args.out);
      std::vector<float> after = download<float>(problem.conventional ? problem.states : problem.args.checkpoint);
      Launch launch;
      for (size_t head = 0; head < static_cast<size_t>(shape.heads); head += 5) {
        compareHead(launch, problem, before, out, after, head % static_cast<size_t>(rows), head, h);
      }
      output = std::max(output, launch.outputError);
      state = std::max(state, launch.stateError);
      outputShare = std::max(outputShare, launch.outputShare());
      stateShare = std::max(stateShare, launch.stateShare());
    }
  }
  const bool green = outputShare <= 1 && stateShare <= 1;
  std::printf("{\"what\": \"gate\", \"case\": \"%s\", \"output_error\": %.3g, \"state_error\": %.3g, "
              "\"output_share\": %.4g, \"state_share\": %.4g, \"green\": %s}\n",
              caseName(shape, c).c_str(), output, state, outputShare, stateShare, green ? "true" : "false");
  std::fflush(stdout);
  return green;
}
