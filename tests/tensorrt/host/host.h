// What the checks of the plugin host share: the plugin library, captured reports, field collections, tensor descriptions.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "NvInferRuntime.h"
#include "replayssm/trt.h"

namespace host {

using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

// Counts failures instead of stopping: one run tells everything that is wrong.
inline int& failures() {
  static int count = 0;
  return count;
}

#define CHECK(condition, ...)                                          \
  do {                                                                 \
    if (!(condition)) {                                                \
      ++host::failures();                                              \
      std::printf("FAILED %s:%d %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                        \
      std::printf("\n");                                               \
    }                                                                  \
  } while (0)

// The last report of the library, taken by each check that expects one.
inline std::string& lastReport() {
  static std::string text;
  return text;
}
inline std::string takeReport() { return std::exchange(lastReport(), std::string()); }

// A named value of a plugin field: an int32, or the bits of a float32.
struct Value {
  const char* name;
  int32_t number;
  PluginFieldType type = PluginFieldType::kINT32;
};

inline Value real(const char* name, float value) {
  Value v{name, 0, PluginFieldType::kFLOAT32};
  std::memcpy(&v.number, &value, sizeof(value));
  return v;
}

// Owns what a PluginFieldCollection points to.
class Fields {
 public:
  explicit Fields(std::vector<Value> values) : values_(std::move(values)) {
    for (Value& v : values_) fields_.emplace_back(v.name, &v.number, v.type, 1);
  }
  std::vector<PluginField>& list() { return fields_; }
  PluginFieldCollection collection() const { return {static_cast<int32_t>(fields_.size()), fields_.data()}; }

 private:
  std::vector<Value> values_;
  std::vector<PluginField> fields_;
};

// One input of a plugin as a network would describe it.
struct Input {
  DataType type;
  std::vector<int64_t> dims;
  bool inPlace;
};

// A dense output [B, T, width], with memory of its own.
struct Result {
  DataType type;
  int64_t width;
};

// A plugin with its fields, inputs and dense outputs.
struct Case {
  const char* plugin;
  std::vector<Value> fields;
  std::vector<Input> inputs;
  std::vector<Result> results;
};

std::vector<Case> cases();

nvinfer1::IPluginCreatorV3One* creator(const char* plugin);

inline nvinfer1::Dims dimsOf(const std::vector<int64_t>& sizes) {
  nvinfer1::Dims dims{};
  dims.nbDims = static_cast<int32_t>(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) dims.d[i] = sizes[i];
  return dims;
}

inline nvinfer1::PluginTensorDesc descOf(const Input& input) {
  nvinfer1::PluginTensorDesc desc{};
  desc.dims = dimsOf(input.dims);
  desc.type = input.type;
  desc.format = nvinfer1::TensorFormat::kLINEAR;
  desc.scale = 1;
  return desc;
}

// The inputs that the outputs have their memory from, in order; -1: a dense output, which has its own.
inline std::vector<int32_t> outputSources(const Case& c) {
  std::vector<int32_t> sources(c.results.size(), -1);
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    if (c.inputs[i].inPlace) sources.push_back(static_cast<int32_t>(i));
  }
  return sources;
}

inline std::vector<Input> outputsOf(const Case& c) {
  std::vector<Input> outputs;
  for (int32_t source : outputSources(c)) outputs.push_back(c.inputs[static_cast<size_t>(source < 0 ? 0 : source)]);
  for (size_t i = 0; i < c.results.size(); ++i) {
    outputs[i].type = c.results[i].type;
    outputs[i].dims[2] = c.results[i].width;
  }
  return outputs;
}

size_t bytesOf(const Input& input);

// The data of an input, of one of so many kinds of garbage; `place`: of the input among the plugin's.
constexpr int kGarbageKinds = 8;
std::vector<char> garbage(const Input& input, int kind, uint32_t place);

void checkLifeCycle(const Case& c);
void checkFields(const Case& c);
void checkRefusals(const Case& c);
int runOnDevice(const char* file);

}  // namespace host
