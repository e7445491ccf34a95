// What the benchmarks of the operations around the update share: one line per measurement.
#pragma once

#include <functional>
#include <string>

#include "bench/pool.h"

// One call on the index-th set of buffers.
using Call = std::function<void(int)>;

struct Reporter {
  cudaStream_t stream;
  double bandwidth;
  std::string gpu;

  void operator()(const char* what, const char* shape, int64_t rows, int64_t tokens, bool programmatic, double bytes,
                  int rotations, const Call& call) const {
    const int launches = rotations * (rotations >= 8 ? 1 : 8);
    auto enqueue = [&] {
      for (int i = 0; i < launches; ++i) call(i % rotations);
    };
    const Timing t = timeCases(stream, launches, {enqueue})[0];
    std::printf("{\"what\": \"%s\", \"shape\": \"%s\", \"B\": %lld, \"T\": %lld, \"programmatic\": %s, \"us\": %.3f, "
                "\"us_quartiles\": [%.3f, %.3f], \"MB\": %.3f, \"GBs\": %.0f, \"percent_of_copy\": %.1f, "
                "\"copy_TBs\": %.3f, \"gpu\": \"%s\"}\n",
                what, shape, static_cast<long long>(rows), static_cast<long long>(tokens),
                programmatic ? "true" : "false", t.median, t.low, t.high, bytes * 1e-6, bytes / t.median * 1e-3,
                100 * bytes / bandwidth / t.median * 1e6, bandwidth * 1e-12, gpu.c_str());
    std::fflush(stdout);
  }
};
