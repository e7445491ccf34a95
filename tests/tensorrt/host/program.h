// A program: plugins one after the other over shared tensors on one stream, as an engine runs them, or as one graph.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "host.h"

namespace host {

inline bool good(cudaError_t code, const char* what) {
  if (code != cudaSuccess) std::printf("FAILED %s: %s\n", what, cudaGetErrorString(code));
  return code == cudaSuccess;
}

// A plugin and the tensors, by number, that it reads and writes; names of the fields are owned here.
struct Call {
  std::string plugin;
  std::vector<std::unique_ptr<std::string>> names;
  std::vector<Value> fields;
  std::vector<int32_t> inputs, results;
  std::vector<bool> inPlace;  // of the inputs
};

// Numbers count tensors. start: those with data before the first step; given: with data before each; outputs are kept
// after each step, states at the end.
struct Description {
  std::vector<Input> tensors;
  std::vector<Call> calls;
  std::vector<int32_t> start, given, outputs, states;
  int32_t steps = 0;
};

// One plugin, bound to the tensors' memory.
class Layer {
 public:
  // A new plugin, or what `other` gives a further context.
  bool open(const Description& all, const Call& call, const std::vector<void*>& memory, const Layer* other);
  bool enqueue(cudaStream_t stream);
  bool spoil();

 private:
  std::unique_ptr<nvinfer1::IPluginV3> plugin_;
  nvinfer1::IPluginV3OneRuntime* runtime_ = nullptr;
  std::vector<nvinfer1::PluginTensorDesc> in_, out_;
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  void* workspace_ = nullptr;
  size_t workspaceBytes_ = 0;
};

// All plugins with memory and a stream of their own.
class Program {
 public:
  explicit Program(const Description& all) : all_(all) {}
  bool open(const Program* other = nullptr);
  bool spoil(int kind);  // with garbage of that kind
  bool run();
  bool capture();  // from now on `run` replays what the plugins enqueue

  const Description& description() const { return all_; }
  void* memory(int32_t tensor) const { return memory_[static_cast<size_t>(tensor)]; }
  size_t bytes(int32_t tensor) const { return bytesOf(all_.tensors[static_cast<size_t>(tensor)]); }

 private:
  bool enqueue();

  const Description& all_;
  std::vector<void*> memory_;
  std::vector<Layer> layers_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

}  // namespace host
