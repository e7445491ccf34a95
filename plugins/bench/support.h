// Benchmark plumbing: device buffers, tensor views, cold-L2 graph timing. Header-only, host code.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <memory>
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

// An instantiated CUDA graph of `launches` launches.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& enqueue) {
    enqueue();
    cudaOk(cudaStreamSynchronize(stream), "warm-up");
    cudaGraph_t graph;
    cudaOk(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    enqueue();
    cudaOk(cudaStreamEndCapture(stream, &graph), "capture");
    cudaOk(cudaGraphInstantiate(&exec_, graph, 0), "instantiate");
    cudaOk(cudaGraphDestroy(graph), "destroy");
  }
  ~Graph() { cudaGraphExecDestroy(exec_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) const { cudaOk(cudaGraphLaunch(exec_, stream), "replay"); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// Microseconds per launch of each case: medians and quartiles over replays. The cases take turns, so that clocks and
// temperature treat them alike.
inline std::vector<Timing> timeCases(cudaStream_t stream, int launches,
                                     const std::vector<std::function<void()>>& cases, int rounds = 24) {
  constexpr int kWarmUp = 4;
  std::vector<std::unique_ptr<Graph>> graphs;
  for (const auto& enqueue : cases) graphs.push_back(std::make_unique<Graph>(stream, enqueue));
  cudaEvent_t start, stop;
  cudaOk(cudaEventCreate(&start), "event");
  cudaOk(cudaEventCreate(&stop), "event");
  std::vector<std::vector<double>> times(cases.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < graphs.size(); ++i) {
      cudaOk(cudaEventRecord(start, stream), "record");
      graphs[i]->launch(stream);
      cudaOk(cudaEventRecord(stop, stream), "record");
      cudaOk(cudaEventSynchronize(stop), "synchronize");
      float milliseconds = 0;
      cudaOk(cudaEventElapsedTime(&milliseconds, start, stop), "elapsed");
      if (round >= kWarmUp) times[i].push_back(milliseconds * 1e3 / launches);
    }
  }
  cudaOk(cudaEventDestroy(start), "destroy");
  cudaOk(cudaEventDestroy(stop), "destroy");
  std::vector<Timing> result;
  for (auto& t : times) {
    std::sort(t.begin(), t.end());
    result.push_back({t[t.size() / 2], t[t.size() / 4], t[t.size() * 3 / 4]});
  }
  return result;
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
