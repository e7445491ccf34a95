// What the benchmark of the operations around the recurrence shares: buffers of a case, and one line per measurement.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/fill.h"
#include "bench/support.h"
#include "replayssm/status.h"

inline void ok(rssm_status status, const rssm_error& error) {
  if (status != RSSM_OK) throw std::runtime_error(error.message);
}

// Buffers of one case, filled with random numbers; freed together.
class Pool {
 public:
  rssm_tensor act(std::initializer_list<int64_t> shape) {
    void* data = allocate(shape, 2);
    cudaOk(fillBfloat16(data, last_, -1.0f, 1.0f, seed_++), "fill");
    return contiguousView(data, RSSM_BFLOAT16, shape);
  }
  rssm_tensor real(std::initializer_list<int64_t> shape, float low = -1.0f, float high = 1.0f) {
    void* data = allocate(shape, 4);
    cudaOk(fillFloat32(data, last_, low, high, seed_++), "fill");
    return contiguousView(data, RSSM_FLOAT32, shape);
  }
  rssm_tensor half(std::initializer_list<int64_t> shape) {
    void* data = allocate(shape, 2);
    cudaOk(fillFloat16(data, last_, -1.0f, 1.0f, seed_++), "fill");
    return contiguousView(data, RSSM_FLOAT16, shape);
  }
  rssm_tensor integers(const std::vector<int32_t>& values) {
    const int64_t count = static_cast<int64_t>(values.size());
    void* data = allocate({count}, 4);
    cudaOk(cudaMemcpy(data, values.data(), values.size() * 4, cudaMemcpyHostToDevice), "copy");
    return contiguousView(data, RSSM_INT32, {count});
  }
  rssm_tensor same(int64_t count, int32_t value) {
    return integers(std::vector<int32_t>(static_cast<size_t>(count), value));
  }

 private:
  void* allocate(std::initializer_list<int64_t> shape, int64_t bytes) {
    last_ = 1;
    for (int64_t size : shape) last_ *= size;
    buffers_.push_back(std::make_unique<Buffer>(last_ * bytes));
    return buffers_.back()->data();
  }
  std::vector<std::unique_ptr<Buffer>> buffers_;
  int64_t last_ = 0;
  uint32_t seed_ = 1;
};

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
