// Benchmark plumbing: device buffers, tensor views, cold-L2 graph timing. Header-only, host code.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "replayssm/tensor.h"

inline void cudaOk(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code));
}

// Owning device allocation.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) { cudaOk(cudaMalloc(&data_, static_cast<size_t>(bytes)), "cudaMalloc"); }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

inline rssm_tensor contiguousView(void* data, int32_t dtype, std::initializer_list<int64_t> shape) {
  rssm_tensor t{};
  t.data = data;
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  int axis = 0;
  for (int64_t size : shape) t.shape[axis++] = size;
  int64_t stride = 1;
  while (axis-- > 0) {
    t.stride[axis] = stride;
    stride *= t.shape[axis];
  }
  return t;
}

struct Timing {
  double median, low, high;  // microseconds per launch; quartiles
};

// Median over graph replays of the mean time of one launch; `enqueue` adds all `launches` of them to the stream.
inline Timing timeGraph(cudaStream_t stream, int launches, const std::function<void()>& enqueue) {
  enqueue();
  cudaOk(cudaStreamSynchronize(stream), "warm-up");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaOk(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  enqueue();
  cudaOk(cudaStreamEndCapture(stream, &graph), "capture");
  cudaOk(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cudaEvent_t start, stop;
  cudaOk(cudaEventCreate(&start), "event");
  cudaOk(cudaEventCreate(&stop), "event");
  std::vector<double> times;
  for (int i = 0; i < 25; ++i) {
    cudaOk(cudaEventRecord(start, stream), "record");
    cudaOk(cudaGraphLaunch(exec, stream), "replay");
    cudaOk(cudaEventRecord(stop, stream), "record");
    cudaOk(cudaEventSynchronize(stop), "synchronize");
    float milliseconds = 0;
    cudaOk(cudaEventElapsedTime(&milliseconds, start, stop), "elapsed");
    if (i >= 4) times.push_back(milliseconds * 1e3 / launches);
  }
  std::sort(times.begin(), times.end());
  cudaOk(cudaGraphExecDestroy(exec), "destroy");
  cudaOk(cudaGraphDestroy(graph), "destroy");
  cudaOk(cudaEventDestroy(start), "destroy");
  cudaOk(cudaEventDestroy(stop), "destroy");
  return {times[times.size() / 2], times[times.size() / 4], times[times.size() * 3 / 4]};
}

// Bytes per second of a large read-and-write copy, eager.
inline double copyBandwidth(cudaStream_t stream) {
  constexpr int64_t kBytes = int64_t{4} << 30;
  Buffer source(kBytes), target(kBytes);
  cudaEvent_t start, stop;
  cudaOk(cudaEventCreate(&start), "event");
  cudaOk(cudaEventCreate(&stop), "event");
  std::vector<double> rates;
  for (int i = 0; i < 8; ++i) {
    cudaOk(cudaEventRecord(start, stream), "record");
    cudaOk(cudaMemcpyAsync(target.data(), source.data(), kBytes, cudaMemcpyDeviceToDevice, stream), "copy");
    cudaOk(cudaEventRecord(stop, stream), "record");
    cudaOk(cudaEventSynchronize(stop), "synchronize");
    float milliseconds = 0;
    cudaOk(cudaEventElapsedTime(&milliseconds, start, stop), "elapsed");
    rates.push_back(2.0 * kBytes / (milliseconds * 1e-3));
  }
  std::sort(rates.begin(), rates.end());
  cudaOk(cudaEventDestroy(start), "destroy");
  cudaOk(cudaEventDestroy(stop), "destroy");
  return rates[rates.size() / 2];
}
