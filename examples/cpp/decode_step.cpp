// Loads the engine of a bundle with the plugin library and times decode steps through TensorRT's C++ runtime.
//
//   decode_step BUNDLE libtrtllm_replayssm_plugins.so libnvinfer.so.11 [steps]
//
// BUNDLE: a bundle of one GPU, or an engine file of it. Needs a GPU and the TensorRT the engine was built with. Everything it has to know about the engine it reads from the
// engine: sizes from the generation profile (index 1), and state tensors by their outputs named NAME.out, which are
// bound to the address of NAME. Compile with build.sh.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "NvInferRuntime.h"

namespace {

constexpr int32_t kGenerationProfile = 1;
constexpr const char* kAliasSuffix = ".out";
constexpr const char* kEngine = "rank0.engine";

class Logger final : public nvinfer1::ILogger {
  void log(Severity severity, const char* message) noexcept override {
    if (severity <= Severity::kWARNING) std::fprintf(stderr, "[TensorRT] %s\n", message);
  }
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "decode_step: %s\n", what.c_str());
  std::exit(1);
}

void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(code));
}

// Of an engine's inputs and outputs: none of ours is narrower than a byte.
int64_t bytesOf(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kINT64: return 8;
    case nvinfer1::DataType::kFLOAT:
    case nvinfer1::DataType::kINT32: return 4;
    case nvinfer1::DataType::kHALF:
    case nvinfer1::DataType::kBF16: return 2;
    default: return 1;
  }
}

int64_t elements(const nvinfer1::Dims& dims) {
  int64_t count = 1;
  for (int32_t i = 0; i < dims.nbDims; ++i) count *= dims.d[i];
  return count;
}

std::vector<char> readEngine(std::filesystem::path path) {
  if (std::filesystem::is_directory(path)) path /= kEngine;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) fail("cannot open " + path.string());
  std::vector<char> bytes(static_cast<size_t>(file.tellg()));
  file.seekg(0);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

// int32 rows: slot b for row b, one token a row; all other inputs stay zero.
void fillRows(const std::string& name, void* device, int64_t count) {
  if (name != "slot" && name != "num_tokens") return;
  std::vector<int32_t> values(static_cast<size_t>(count), 1);
  for (size_t i = 0; name == "slot" && i < values.size(); ++i) values[i] = static_cast<int32_t>(i);
  check(cudaMemcpy(device, values.data(), values.size() * sizeof(int32_t), cudaMemcpyHostToDevice), "copy");
}

// Allocates every tensor of the engine and binds it; a state output shares its input's memory.
std::map<std::string, void*> bind(nvinfer1::ICudaEngine& engine, nvinfer1::IExecutionContext& context) {
  std::map<std::string, void*> memory;
  auto allocate = [&](const std::string& name, const nvinfer1::Dims& dims) {
    int64_t bytes = elements(dims) * bytesOf(engine.getTensorDataType(name.c_str()));
    void* data = nullptr;
    check(cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(bytes, 256))), name.c_str());
    check(cudaMemset(data, 0, static_cast<size_t>(bytes)), name.c_str());
    memory[name] = data;
  };
  for (int32_t i = 0; i < engine.getNbIOTensors(); ++i) {
    const char* name = engine.getIOTensorName(i);
    if (engine.getTensorIOMode(name) != nvinfer1::TensorIOMode::kINPUT) continue;
    nvinfer1::Dims dims = engine.getProfileShape(name, kGenerationProfile, nvinfer1::OptProfileSelector::kOPT);
    if (!context.setInputShape(name, dims)) fail(std::string("the engine refuses the shape of ") + name);
    allocate(name, dims);
    fillRows(name, memory[name], elements(dims));
  }
  for (int32_t i = 0; i < engine.getNbIOTensors(); ++i) {
    std::string name = engine.getIOTensorName(i);
    if (engine.getTensorIOMode(name.c_str()) == nvinfer1::TensorIOMode::kOUTPUT) {
      size_t end = name.rfind(kAliasSuffix);
      auto state = end == std::string::npos ? memory.end() : memory.find(name.substr(0, end));
      if (state != memory.end()) {
        memory[name] = state->second;
      } else {
        allocate(name, context.getTensorShape(name.c_str()));
      }
    }
    if (!context.setTensorAddress(name.c_str(), memory[name])) fail("cannot bind " + name);
  }
  return memory;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) fail("usage: decode_step BUNDLE PLUGIN_LIBRARY LIBNVINFER [steps]");
  int steps = argc > 4 ? std::atoi(argv[4]) : 100;
  if (steps < 1) fail("expected a number of steps of at least 1");
  std::vector<char> bytes = readEngine(argv[1]);
  void* library = dlopen(argv[3], RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) fail(dlerror());
  auto create = reinterpret_cast<void* (*)(void*, int32_t)>(dlsym(library, "createInferRuntime_INTERNAL"));
  if (create == nullptr) fail(std::string(argv[3]) + " is no TensorRT runtime");
  auto version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
  int32_t major = version == nullptr ? 0 : version() / 10000;
  if (major != NV_TENSORRT_MAJOR) {
    fail(std::string(argv[3]) + " is TensorRT " + std::to_string(major) + ", compiled for " +
         std::to_string(NV_TENSORRT_MAJOR));
  }
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "a GPU is needed");
  Logger logger;
  std::unique_ptr<nvinfer1::IRuntime> runtime(static_cast<nvinfer1::IRuntime*>(create(&logger, NV_TENSORRT_VERSION)));
  if (runtime == nullptr) fail("TensorRT refuses to start (its version and the headers' must agree)");
  if (runtime->getPluginRegistry().loadLibrary(argv[2]) == nullptr) fail(std::string("cannot load ") + argv[2]);

  std::unique_ptr<nvinfer1::ICudaEngine> engine(runtime->deserializeCudaEngine(bytes.data(), bytes.size()));
  if (engine == nullptr) fail("the engine does not load here: build it for this TensorRT version and GPU");
  std::unique_ptr<nvinfer1::IExecutionContext> context(engine->createExecutionContext());
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  if (!context->setOptimizationProfileAsync(kGenerationProfile, stream)) fail("the engine has no generation profile");
  check(cudaStreamSynchronize(stream), "profile");
  std::map<std::string, void*> memory = bind(*engine, *context);

  std::vector<float> times;
  cudaEvent_t before = nullptr, after = nullptr;
  check(cudaEventCreate(&before), "event");
  check(cudaEventCreate(&after), "event");
  for (int step = -3; step < steps; ++step) {  // three to warm up
    check(cudaEventRecord(before, stream), "record");
    if (!context->enqueueV3(stream)) fail("the step failed; the plugin library has said why");
    check(cudaEventRecord(after, stream), "record");
    check(cudaEventSynchronize(after), "step");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, before, after), "elapsed");
    if (step >= 0) times.push_back(milliseconds);
  }
  std::sort(times.begin(), times.end());
  std::printf("%d steps: median %.3f ms, quartiles %.3f and %.3f ms\n", steps, times[times.size() / 2],
              times[times.size() / 4], times[times.size() * 3 / 4]);
  return 0;
}
