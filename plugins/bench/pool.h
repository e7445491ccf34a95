// Device tensors of a benchmark, filled and freed together.
#pragma once

#include <memory>
#include <vector>

#include "bench/fill.h"
#include "bench/support.h"
#include "replayssm/status.h"

inline void ok(rssm_status status, const rssm_error& error) {
  if (status != RSSM_OK) throw std::runtime_error(error.message);
}

// Random numbers: each tensor has its own, the same in every run.
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
  rssm_tensor counting(int64_t count, int32_t first = 0) {
    std::vector<int32_t> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<int32_t>(i);
    return integers(values);
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
