// enqueue with real tensors: reads a case, runs its steps on one stream, writes what the plugin wrote.
//
// FILE, little endian, written by test_plugins_gpu.py:
//   int32 fields; each: int32 length of the name, its characters, int32 value
//   int32 inputs; each: int32 type, int32 in_place, int32 rank, int64 dims[rank]
//   int32 width of the dense output or 0, int32 steps
//   data of the in-place inputs, in order; then for each step the data of the others, in order
// FILE.out: the dense output after each step, then the in-place tensors at the end.
// Before the first step every buffer is filled with 0x7f bytes and the plugin runs once, as an engine builder times its
// candidates: ids and cursors far out of range must do no harm.
#include <cuda_runtime_api.h>

#include <fstream>

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

size_t bytesOf(const Input& input) {
  size_t bytes = 1;
  switch (input.type) {
    case DataType::kINT64: bytes = 8; break;
    case DataType::kFLOAT:
    case DataType::kINT32: bytes = 4; break;
    case DataType::kHALF:
    case DataType::kBF16: bytes = 2; break;
    default: break;
  }
  for (int64_t size : input.dims) bytes *= static_cast<size_t>(size);
  return bytes;
}

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

}  // namespace

int runOnDevice(const char* name, const char* path) {
  Reader reader(path);
  if (!reader.good()) return 1;
  std::vector<std::string> names;
  std::vector<Value> values;
  int32_t numFields = reader.number<int32_t>();
  names.reserve(static_cast<size_t>(numFields));  // values point into it
  for (int32_t i = 0; i < numFields; ++i) {
    const std::string& field = names.emplace_back(reader.text());
    values.push_back({field.c_str(), reader.number<int32_t>()});
  }
  Fields fields(values);
  Case c{name, values, {}, 0};
  int32_t count = reader.number<int32_t>();
  for (int32_t i = 0; i < count; ++i) {
    Input input{static_cast<DataType>(reader.number<int32_t>()), {}, false};
    input.inPlace = reader.number<int32_t>() != 0;
    int32_t rank = reader.number<int32_t>();
    for (int32_t d = 0; d < rank; ++d) input.dims.push_back(reader.number<int64_t>());
    c.inputs.push_back(input);
  }
  c.width = reader.number<int32_t>();
  int32_t steps = reader.number<int32_t>();

  PluginFieldCollection collection = fields.collection();
  std::unique_ptr<nvinfer1::IPluginV3> plugin(
      creator(name)->createPlugin("run", &collection, nvinfer1::TensorRTPhase::kRUNTIME));
  if (plugin == nullptr) return std::printf("FAILED %s\n", lastReport().c_str()), 1;
  auto* runtime = static_cast<nvinfer1::IPluginV3OneRuntime*>(
      plugin->getCapabilityInterface(nvinfer1::PluginCapabilityType::kRUNTIME));
  auto* build = static_cast<nvinfer1::IPluginV3OneBuildV2*>(
      plugin->getCapabilityInterface(nvinfer1::PluginCapabilityType::kBUILD));

  Buffers buffers;
  cudaStream_t stream = nullptr;
  if (!allocate(c, buffers) || !good(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream")) return 1;
  size_t workspaceBytes = build->getWorkspaceSize(nullptr, 0, nullptr, 0);
  void* workspace = nullptr;
  if (!good(cudaMalloc(&workspace, workspaceBytes + 256), "cudaMalloc")) return 1;
  std::vector<nvinfer1::PluginTensorDesc> in, out;
  for (const Input& input : c.inputs) in.push_back(descOf(input));
  for (const Input& output : outputsOf(c)) out.push_back(descOf(output));
  auto enqueue = [&] {
    int32_t failed = runtime->enqueue(in.data(), out.data(), buffers.inputs.data(), buffers.outputs.data(), workspace, stream);
    if (failed != 0) std::printf("FAILED enqueue: %s\n", lastReport().c_str());
    return failed == 0 && good(cudaStreamSynchronize(stream), "step");
  };

  for (size_t i = 0; i < buffers.inputs.size(); ++i) cudaMemset(buffers.inputs[i], 0x7f, buffers.inputBytes[i]);
  cudaMemset(workspace, 0x7f, workspaceBytes);
  if (!good(cudaDeviceSynchronize(), "garbage") || !enqueue()) return 1;

  for (size_t i = 0; i < c.inputs.size(); ++i) {
    if (!c.inputs[i].inPlace) continue;
    std::vector<char> data = reader.bytes(buffers.inputBytes[i]);
    good(cudaMemcpy(buffers.inputs[i], data.data(), data.size(), cudaMemcpyHostToDevice), "copy");
  }
  std::ofstream results(std::string(path) + ".out", std::ios::binary);
  for (int32_t step = 0; step < steps; ++step) {
    for (size_t i = 0; i < c.inputs.size(); ++i) {
      if (c.inputs[i].inPlace) continue;
      std::vector<char> data = reader.bytes(buffers.inputBytes[i]);
      good(cudaMemcpy(buffers.inputs[i], data.data(), data.size(), cudaMemcpyHostToDevice), "copy");
    }
    if (!enqueue()) return 1;
    if (c.width > 0) keep(results, buffers.outputs[0], buffers.outputBytes[0]);
  }
  for (size_t i = c.width > 0 ? 1 : 0; i < buffers.outputs.size(); ++i) {
    keep(results, buffers.outputs[i], buffers.outputBytes[i]);
  }
  std::printf("%s: %d steps\n", name, steps);
  return 0;
}

}  // namespace host
