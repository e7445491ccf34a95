// The life of a plugin, once for all operations: IPluginV3 with its core, build (V2, aliased outputs) and runtime parts.
//
// An Operation gives what differs:
//     static constexpr const char* kName;
//     struct Config { template <class Visitor> void visit(Visitor&); bool check(rssm_error&) const; };
//     struct Args;                                             // views by name; zero-initialised, then filled from ports
//     static std::vector<Port<Args>> ports(const Config&);     // inputs
//     static std::vector<Port<Args>> results(const Config&);   // dense outputs [B, T, channels], B and T of input 0
//     static size_t workspaceBytes(const Config&, Args&);      // views of the largest shapes; throws what refuses them
//     static rssm_status run(const Config&, Args&, void* workspace, cudaStream_t, rssm_error*);
// Every method body that can throw runs inside `guarded`: nothing is thrown into TensorRT, every failure is reported once.
#pragma once

#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "trt/fields.h"
#include "trt/port.h"

namespace replayssm::trt {

constexpr const char* kNamespace = "replayssm";
constexpr const char* kVersion = "1";

// Runs `body` and turns what it throws into a report and `failed`.
template <class Result, class Body>
Result guarded(const char* plugin, const char* method, Result failed, Body&& body) noexcept {
  try {
    return body();
  } catch (const std::exception& cause) {
    report(plugin, method, failure(RSSM_INTERNAL, "%s", cause.what()));
  } catch (...) {
    report(plugin, method, failure(RSSM_INTERNAL, "an exception of unknown type"));
  }
  return failed;
}

template <class Operation>
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  using Args = typename Operation::Args;
  using Config = typename Operation::Config;

  explicit Plugin(Config config)
      : config_(std::move(config)), ports_(Operation::ports(config_)), results_(Operation::results(config_)) {
    for (size_t i = 0; i < ports_.size(); ++i) {
      if (ports_[i].inPlace) inPlace_.push_back(static_cast<int32_t>(i));
    }
    FieldList list;
    config_.visit(list);
    fields_ = list.take();
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  Plugin(const Plugin&) = delete;
  Plugin& operator=(const Plugin&) = delete;

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kCORE: return static_cast<nvinfer1::IPluginV3OneCore*>(this);
      case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }

  nvinfer1::IPluginV3* clone() noexcept override {
    return guarded<nvinfer1::IPluginV3*>(Operation::kName, "clone", nullptr, [&] { return new Plugin(config_); });
  }

  const char* getPluginName() const noexcept override { return Operation::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t getNbOutputs() const noexcept override { return denseOutputs() + static_cast<int32_t>(inPlace_.size()); }

  int32_t getAliasedInput(int32_t output) noexcept override {
    int32_t place = output - denseOutputs();
    return place < 0 || place >= static_cast<int32_t>(inPlace_.size()) ? -1 : inPlace_[static_cast<size_t>(place)];
  }

  int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t numOutputs, const nvinfer1::DataType* inputs,
                             int32_t numInputs) const noexcept override {
    if (!counts("getOutputDataTypes", numInputs, numOutputs)) return -1;
    for (int32_t i = 0; i < numOutputs; ++i) {
      outputs[i] = i < denseOutputs() ? networkType(results_[static_cast<size_t>(i)].dtype) : inputs[source(i)];
    }
    return 0;
  }

  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t numInputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* outputs, int32_t numOutputs,
                          nvinfer1::IExprBuilder& expressions) noexcept override {
    if (!counts("getOutputShapes", numInputs, numOutputs)) return -1;
    for (int32_t i = 0; i < numOutputs; ++i) outputs[i] = inputs[source(i)];
    for (size_t i = 0; i < results_.size(); ++i) outputs[i].d[2] = expressions.constant(results_[i].channels.count());
    return 0;
  }

  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t numInputs,
                                 int32_t numOutputs) noexcept override {
    if (!counts("supportsFormatCombination", numInputs, numOutputs)) return false;
    int32_t output = position - numInputs;
    const Port<Args>& port = output < 0                ? ports_[static_cast<size_t>(position)]
                             : output < denseOutputs() ? results_[static_cast<size_t>(output)]
                                                       : ports_[static_cast<size_t>(source(output))];
    const nvinfer1::PluginTensorDesc& got = tensors[position].desc;
    return got.format == nvinfer1::TensorFormat::kLINEAR &&
           (port.dtype == RSSM_NO_DTYPE ||
            got.type == (port.bytes ? nvinfer1::DataType::kINT8 : networkType(port.dtype)));
  }

  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t numInputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t numOutputs) noexcept override {
    if (!counts("configurePlugin", numInputs, numOutputs)) return -1;
    for (int32_t i = 0; i < numInputs; ++i) {
      if (!fits("configurePlugin", i, inputs[i].desc.dims)) return -1;
    }
    size_t bytes = 0;  // getWorkspaceSize cannot fail, so that what would make it fail ends here
    return workspace("configurePlugin", inputs, bytes) ? 0 : -1;
  }

  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t numInputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t numOutputs) const noexcept override {
    size_t bytes = 0;
    if (counts("getWorkspaceSize", numInputs, numOutputs)) workspace("getWorkspaceSize", inputs, bytes);
    return bytes;
  }

  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t numInputs, const nvinfer1::PluginTensorDesc*,
                        int32_t numOutputs) noexcept override {
    if (!counts("onShapeChange", numInputs, numOutputs)) return -1;
    for (int32_t i = 0; i < numInputs; ++i) {
      if (!fits("onShapeChange", i, inputs[i].dims)) return -1;
    }
    return 0;
  }

  int32_t enqueue(const nvinfer1::PluginTensorDesc* inputDesc, const nvinfer1::PluginTensorDesc* outputDesc,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override {
    return guarded<int32_t>(Operation::kName, "enqueue", -1, [&]() -> int32_t {
      rssm_error error{};
      if (enqueueStep(inputDesc, outputDesc, inputs, outputs, workspace, stream, error)) return 0;
      report(Operation::kName, "enqueue", error);
      return -1;
    });
  }

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }

  const PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

 private:
  int32_t denseOutputs() const { return static_cast<int32_t>(results_.size()); }

  // The input that output `i` has its shape from, but for the channels of a dense output.
  int32_t source(int32_t i) const {
    return i < denseOutputs() ? 0 : inPlace_[static_cast<size_t>(i - denseOutputs())];
  }

  // The bytes that the largest shapes need.
  bool workspace(const char* method, const nvinfer1::DynamicPluginTensorDesc* inputs, size_t& bytes) const noexcept {
    return guarded<bool>(Operation::kName, method, false, [&] {
      alignas(256) static char somewhere[256];  // never followed: sizes alone decide
      Args args{};
      for (size_t i = 0; i < ports_.size(); ++i) args.*(ports_[i].view) = viewOf(ports_[i], inputs[i].max, somewhere);
      for (const Port<Args>& result : results_) {
        nvinfer1::Dims dims = inputs[0].max;
        dims.d[2] = result.channels.count();
        args.*(result.view) = viewOf(result, dims, somewhere);
      }
      bytes = Operation::workspaceBytes(config_, args);
      return true;
    });
  }

  bool counts(const char* method, int32_t numInputs, int32_t numOutputs) const noexcept {
    int32_t expected = static_cast<int32_t>(ports_.size());
    if (numInputs == expected && numOutputs == getNbOutputs()) return true;
    report(Operation::kName, method,
           failure(RSSM_INVALID_ARGUMENT, "expected %d inputs and %d outputs, got %d and %d", expected, getNbOutputs(),
                   numInputs, numOutputs));
    return false;
  }

  // Rank, and channels that lie within the projection (an unknown extent is -1 and is looked at when it is known).
  bool fits(const char* method, int32_t input, const nvinfer1::Dims& dims) const noexcept {
    const auto& port = ports_[static_cast<size_t>(input)];
    if (port.rank >= 0 && port.rank != dims.nbDims) {
      report(Operation::kName, method,
             failure(RSSM_INVALID_ARGUMENT, "%s: expected rank %d, got %d", port.name, port.rank, dims.nbDims));
      return false;
    }
    int64_t end = port.channels.offset + port.channels.count();
    if (port.channels.heads == 0 || dims.d[2] < 0 || end <= dims.d[2]) return true;
    report(Operation::kName, method,
           failure(RSSM_INVALID_ARGUMENT, "%s: expected a last axis of at least %lld channels (offset %d), got %lld",
                   port.name, static_cast<long long>(end), port.channels.offset, static_cast<long long>(dims.d[2])));
    return false;
  }

  static rssm_tensor viewOf(const Port<Args>& port, const nvinfer1::Dims& dims, const void* data) {
    return port.channels.heads > 0 ? channelView(dims, port.dtype, data, port.channels)
                                   : denseView(dims, port.dtype, data, port.bytes);
  }

  bool enqueueStep(const nvinfer1::PluginTensorDesc* inputDesc, const nvinfer1::PluginTensorDesc* outputDesc,
                   const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
                   rssm_error& error) const {
    Args args{};
    for (size_t i = 0; i < ports_.size(); ++i) args.*(ports_[i].view) = viewOf(ports_[i], inputDesc[i].dims, inputs[i]);
    for (size_t i = 0; i < results_.size(); ++i) {
      args.*(results_[i].view) = viewOf(results_[i], outputDesc[i].dims, outputs[i]);
    }
    for (size_t i = 0; i < inPlace_.size(); ++i) {
      int32_t input = inPlace_[i];
      if (outputs[static_cast<size_t>(denseOutputs()) + i] == inputs[input]) continue;
      error = failure(RSSM_INVALID_ARGUMENT,
                      "%s: expected the output bound to its input's address (it is updated in place), got %p and %p; "
                      "build with the preview feature ALIASED_PLUGIN_IO_10_03 and bind one pool tensor to both",
                      ports_[static_cast<size_t>(input)].name, inputs[input],
                      outputs[static_cast<size_t>(denseOutputs()) + i]);
      return false;
    }
    return Operation::run(config_, args, workspace, stream, &error) == RSSM_OK;
  }

  Config config_;
  std::vector<Port<Args>> ports_, results_;
  std::vector<int32_t> inPlace_;  // inputs that are updated in place, in order
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

template <class Operation>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() {
    FieldList list;
    config_.visit(list);
    fields_ = list.take();
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  nvinfer1::IPluginV3* createPlugin(const char* layer, const PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    return guarded<nvinfer1::IPluginV3*>(Operation::kName, "createPlugin", nullptr, [&]() -> nvinfer1::IPluginV3* {
      typename Operation::Config config;
      FieldParser parser(fields);
      config.visit(parser);
      rssm_error error{};
      if (parser.finish() ? config.check(error) : (error = parser.error(), false)) return new Plugin<Operation>(config);
      std::string method = std::string("createPlugin '") + (layer == nullptr ? "" : layer) + "'";
      report(Operation::kName, method.c_str(), error);
      return nullptr;
    });
  }

  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return Operation::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  typename Operation::Config config_{};  // only its fields' names and types count
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

}  // namespace replayssm::trt
