// enqueue with real tensors: reads a case, runs its steps on one stream, writes what the plugin wrote.
//
// FILE, little endian, written by test_plugins_gpu.py:
//   int32 fields; each: int32 length of the name, its characters, int32 real, int32 value or float32
//   int32 inputs; each: int32 type, int32 in_place, int32 rank, int64 dims[rank]
//   int32 dense outputs; each: int32 type, int32 width; int32 steps
//   data of the in-place inputs, in order; then for each step the data of the others, in order
// FILE.out: the dense outputs after each step, then the in-place tensors at the end. FILE.replayed: the same, the steps
// run once more from the same start as replays of one CUDA graph. FILE.thread0 and on: by threads at the same time, each
// with a plugin attached to a context of its own; every other one replays a graph of its own.
// Before the first step the plugin runs over several kinds of garbage, as an engine builder times its candidates: see
// garbage.cpp.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "host.h"

namespace host {
namespace {

bool good(cudaError_t code, const char* what) {
  if (code != cudaSuccess) std::printf("FAILED %s: %s\n", what, cudaGetErrorString(code));
  return code == cudaSuccess;
}

class Reader {
 public:
  explicit Reader(const char* path) : file_(path, std::ios::binary) {}
  bool good() const { return file_.good(); }
  std::streampos place() { return file_.tellg(); }
  void goTo(std::streampos place) { file_.seekg(place); }
  template <class T>
  T number() {
    T value{};
    file_.read(reinterpret_cast<char*>(&value), sizeof(value));
    return value;
  }
  std::string text() {
    std::string value(static_cast<size_t>(number<int32_t>()), '\0');
    file_.read(value.data(), static_cast<std::streamsize>(value.size()));
    return value;
  }
  std::vector<char> bytes(size_t count) {
    std::vector<char> value(count);
    file_.read(value.data(), static_cast<std::streamsize>(count));
    return value;
  }

 private:
  std::ifstream file_;
};

// Device buffers of one plugin: an output in place shares its input's.
struct Buffers {
  std::vector<void*> inputs, outputs;
  std::vector<size_t> inputBytes, outputBytes;
};

bool allocate(const Case& c, Buffers& buffers) {
  for (const Input& input : c.inputs) {
    void* data = nullptr;
    if (!good(cudaMalloc(&data, bytesOf(input) + 256), "cudaMalloc")) return false;
    buffers.inputs.push_back(data);
    buffers.inputBytes.push_back(bytesOf(input));
  }
  std::vector<int32_t> sources = outputSources(c);
  std::vector<Input> outputs = outputsOf(c);
  for (size_t i = 0; i < outputs.size(); ++i) {
    void* data = sources[i] < 0 ? nullptr : buffers.inputs[static_cast<size_t>(sources[i])];
    if (data == nullptr && !good(cudaMalloc(&data, bytesOf(outputs[i]) + 256), "cudaMalloc")) return false;
    buffers.outputs.push_back(data);
    buffers.outputBytes.push_back(bytesOf(outputs[i]));
  }
  return true;
}

void keep(std::ofstream& out, const void* device, size_t bytes) {
  std::vector<char> data(bytes);
  good(cudaMemcpy(data.data(), device, bytes, cudaMemcpyDeviceToHost), "copy back");
  out.write(data.data(), static_cast<std::streamsize>(bytes));
}

// The plugin's fields, inputs and dense outputs; `names` owns what the fields point to.
Case readCase(const char* plugin, Reader& reader, std::vector<std::string>& names) {
  Case c{plugin, {}, {}, {}};
  int32_t numFields = reader.number<int32_t>();
  names.reserve(static_cast<size_t>(numFields));
  for (int32_t i = 0; i < numFields; ++i) {
    const std::string& field = names.emplace_back(reader.text());
    PluginFieldType type = reader.number<int32_t>() != 0 ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32;
    c.fields.push_back({field.c_str(), reader.number<int32_t>(), type});
  }
  int32_t count = reader.number<int32_t>();
  for (int32_t i = 0; i < count; ++i) {
    Input input{static_cast<DataType>(reader.number<int32_t>()), {}, false};
    input.inPlace = reader.number<int32_t>() != 0;
    int32_t rank = reader.number<int32_t>();
    for (int32_t d = 0; d < rank; ++d) input.dims.push_back(reader.number<int64_t>());
    c.inputs.push_back(input);
  }
  count = reader.number<int32_t>();
  for (int32_t i = 0; i < count; ++i) {
    DataType type = static_cast<DataType>(reader.number<int32_t>());
    c.results.push_back({type, reader.number<int32_t>()});
  }
  return c;
}

// One plugin at one shape: what an engine holds of it, and its launch as it is or as a replay.
class Layer {
 public:
  // A new plugin, or what `other` gives a further context.
  bool open(const Case& c, const Layer* other = nullptr) {
    Fields fields(c.fields);
    PluginFieldCollection collection = fields.collection();
    plugin_.reset(other != nullptr
                      ? other->runtime_->attachToContext(nullptr)
                      : creator(c.plugin)->createPlugin("run", &collection, nvinfer1::TensorRTPhase::kRUNTIME));
    if (plugin_ == nullptr) return std::printf("FAILED %s\n", lastReport().c_str()), false;
    using Type = nvinfer1::PluginCapabilityType;
    runtime_ = static_cast<nvinfer1::IPluginV3OneRuntime*>(plugin_->getCapabilityInterface(Type::kRUNTIME));
    auto* build = static_cast<nvinfer1::IPluginV3OneBuildV2*>(plugin_->getCapabilityInterface(Type::kBUILD));
    std::vector<nvinfer1::DynamicPluginTensorDesc> all;
    for (const Input& input : c.inputs) in_.push_back(descOf(input));
    for (const Input& output : outputsOf(c)) out_.push_back(descOf(output));
    for (const auto* list : {&in_, &out_}) {
      for (const nvinfer1::PluginTensorDesc& desc : *list) all.push_back({desc, desc.dims, desc.dims, desc.dims});
    }
    int32_t numInputs = static_cast<int32_t>(in_.size()), numOutputs = static_cast<int32_t>(out_.size());
    if (build->configurePlugin(all.data(), numInputs, all.data() + numInputs, numOutputs) != 0) {
      return std::printf("FAILED configurePlugin: %s\n", lastReport().c_str()), false;
    }
    workspaceBytes_ = build->getWorkspaceSize(all.data(), numInputs, all.data() + numInputs, numOutputs);
    return allocate(c, buffers) && good(cudaMalloc(&workspace_, workspaceBytes_ + 256), "cudaMalloc") &&
           good(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  }

  void spoil(const Case& c, int kind) {
    for (size_t i = 0; i < buffers.inputs.size(); ++i) {
      std::vector<char> data = garbage(c.inputs[i], kind, static_cast<uint32_t>(i));
      good(cudaMemcpy(buffers.inputs[i], data.data(), data.size(), cudaMemcpyHostToDevice), "garbage");
    }
    cudaMemset(workspace_, 0x7f, workspaceBytes_);
    good(cudaDeviceSynchronize(), "garbage");
  }

  bool run() {
    if (replay_ != nullptr) return good(cudaGraphLaunch(replay_, stream_), "replay") && settled();
    return enqueue() && settled();
  }

  // From now on `run` replays what `enqueue` launches.
  bool capture() {
    cudaGraph_t graph = nullptr;
    return good(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture") && enqueue() &&
           good(cudaStreamEndCapture(stream_, &graph), "end of capture") &&
           good(cudaGraphInstantiate(&replay_, graph, 0), "graph");
  }

  Buffers buffers;

 private:
  bool enqueue() {
    int32_t failed =
        runtime_->enqueue(in_.data(), out_.data(), buffers.inputs.data(), buffers.outputs.data(), workspace_, stream_);
    if (failed != 0) std::printf("FAILED enqueue: %s\n", lastReport().c_str());
    return failed == 0;
  }
  bool settled() const { return good(cudaStreamSynchronize(stream_), "step"); }

  std::unique_ptr<nvinfer1::IPluginV3> plugin_;
  nvinfer1::IPluginV3OneRuntime* runtime_ = nullptr;
  std::vector<nvinfer1::PluginTensorDesc> in_, out_;
  void* workspace_ = nullptr;
  size_t workspaceBytes_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

// Waits for the copies: the layer's stream does not.
void load(Reader& reader, const Case& c, Buffers& buffers, bool inPlace) {
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    if (c.inputs[i].inPlace != inPlace) continue;
    std::vector<char> data = reader.bytes(buffers.inputBytes[i]);
    good(cudaMemcpy(buffers.inputs[i], data.data(), data.size(), cudaMemcpyHostToDevice), "copy");
  }
  good(cudaStreamSynchronize(cudaStreamLegacy), "copies");
}

// The steps that come next in `reader`, from the state before them.
bool runSteps(Reader& reader, const Case& c, int32_t steps, Layer& layer, const std::string& results, bool captured) {
  Buffers& buffers = layer.buffers;
  load(reader, c, buffers, true);
  if (captured && !layer.capture()) return false;
  std::ofstream file(results, std::ios::binary);
  for (int32_t step = 0; step < steps; ++step) {
    load(reader, c, buffers, false);
    if (!layer.run()) return false;
    for (size_t i = 0; i < c.results.size(); ++i) keep(file, buffers.outputs[i], buffers.outputBytes[i]);
  }
  for (size_t i = c.results.size(); i < buffers.outputs.size(); ++i) {
    keep(file, buffers.outputs[i], buffers.outputBytes[i]);
  }
  return reader.good();
}

bool runInThreads(const char* path, std::streampos start, const Case& c, int32_t steps, const Layer& first) {
  constexpr int kThreads = 4;
  bool held[kThreads] = {};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      Reader reader(path);
      reader.goTo(start);
      Layer layer;
      held[i] = layer.open(c, &first) &&
                runSteps(reader, c, steps, layer, path + (".thread" + std::to_string(i)), i % 2 != 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return std::all_of(held, held + kThreads, [](bool one) { return one; });
}

}  // namespace

int runOnDevice(const char* name, const char* path) {
  Reader reader(path);
  if (!reader.good()) return 1;
  std::vector<std::string> names;
  Case c = readCase(name, reader, names);
  int32_t steps = reader.number<int32_t>();
  Layer layer;
  if (!layer.open(c)) return 1;
  for (int kind = 0; kind < kGarbageKinds; ++kind) {
    layer.spoil(c, kind);
    if (!layer.run()) return 1;
  }
  const std::streampos start = reader.place();
  if (!runSteps(reader, c, steps, layer, path + std::string(".out"), false)) return 1;
  reader.goTo(start);
  if (!runSteps(reader, c, steps, layer, path + std::string(".replayed"), true)) return 1;
  if (!runInThreads(path, start, c, steps, layer)) return 1;
  std::printf("%s: %d steps\n", name, steps);
  return 0;
}

}  // namespace host
