// The life of a plugin, once for all operations: IPluginV3 with its core, build (V2, aliased outputs) and runtime parts.
//
// An Operation gives what differs:
//     static constexpr const char* kName;
//     struct Config { template <class Visitor> void visit(Visitor&); bool check(rssm_error&) const; };
//     using Args;                                              // the C ABI's args struct
//     static std::vector<Port<Args>> ports(const Config&);     // inputs
//     static constexpr int32_t kResult;                        // input whose shape and type the dense output has, -1: none
//     static rssm_tensor Args::*const kResultView;
//     static constexpr size_t kWorkspaceBytes;
//     static rssm_status run(const Config&, Args&, void* workspace, cudaStream_t, rssm_error*);
// Every method body runs inside `guarded`: nothing is thrown into TensorRT, every failure is reported once.
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

  explicit Plugin(Config config) : config_(std::move(config)), ports_(Operation::ports(config_)) {
    for (size_t i = 0; i < ports_.size(); ++i) {
      if (ports_[i].inPlace) inPlace_.push_back(static_cast<int32_t>(i));
    }
    FieldValues values;
    config_.visit(values);
    fields_ = values.take();
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
    for (int32_t i = 0; i < numOutputs; ++i) outputs[i] = inputs[source(i)];
    return 0;
  }

  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t numInputs, const nvinfer1::DimsExprs*, int32_t,
                          nvinfer1::DimsExprs* outputs, int32_t numOutputs, nvinfer1::IExprBuilder&) noexcept override {
    if (!counts("getOutputShapes", numInputs, numOutputs)) return -1;
    for (int32_t i = 0; i < numOutputs; ++i) outputs[i] = inputs[source(i)];
    return 0;
  }

  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t numInputs,
                                 int32_t numOutputs) noexcept override {
    if (!counts("supportsFormatCombination", numInputs, numOutputs)) return false;
    const auto& port = ports_[static_cast<size_t>(position < numInputs ? position : source(position - numInputs))];
    const nvinfer1::PluginTensorDesc& got = tensors[position].desc;
    return got.format == nvinfer1::TensorFormat::kLINEAR &&
           (port.dtype == RSSM_NO_DTYPE || got.type == networkType(port.dtype));
  }

  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t numInputs,
                          const nvinfer1::DynamicPluginTensorDesc*, int32_t numOutputs) noexcept override {
    if (!counts("configurePlugin", numInputs, numOutputs)) return -1;
    for (int32_t i = 0; i < numInputs; ++i) {
      if (!rankFits("configurePlugin", i, inputs[i].desc.dims.nbDims)) return -1;
    }
    return 0;
  }

  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc*, int32_t, const nvinfer1::DynamicPluginTensorDesc*,
                          int32_t) const noexcept override {
    return Operation::kWorkspaceBytes;
  }

  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t numInputs, const nvinfer1::PluginTensorDesc*,
                        int32_t numOutputs) noexcept override {
    if (!counts("onShapeChange", numInputs, numOutputs)) return -1;
    for (int32_t i = 0; i < numInputs; ++i) {
      if (!rankFits("onShapeChange", i, inputs[i].dims.nbDims)) return -1;
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
  static constexpr int32_t denseOutputs() { return Operation::kResult < 0 ? 0 : 1; }

  // The input that gives output `i` its shape and type.
  int32_t source(int32_t i) const {
    return i < denseOutputs() ? Operation::kResult : inPlace_[static_cast<size_t>(i - denseOutputs())];
  }

  bool counts(const char* method, int32_t numInputs, int32_t numOutputs) const noexcept {
    int32_t expected = static_cast<int32_t>(ports_.size());
    if (numInputs == expected && numOutputs == getNbOutputs()) return true;
    report(Operation::kName, method,
           failure(RSSM_INVALID_ARGUMENT, "expected %d inputs and %d outputs, got %d and %d", expected, getNbOutputs(),
                   numInputs, numOutputs));
    return false;
  }

  bool rankFits(const char* method, int32_t input, int32_t rank) const noexcept {
    const auto& port = ports_[static_cast<size_t>(input)];
    if (port.rank < 0 || port.rank == rank) return true;
    report(Operation::kName, method,
           failure(RSSM_INVALID_ARGUMENT, "%s: expected rank %d, got %d", port.name, port.rank, rank));
    return false;
  }

  bool enqueueStep(const nvinfer1::PluginTensorDesc* inputDesc, const nvinfer1::PluginTensorDesc* outputDesc,
                   const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream,
                   rssm_error& error) const {
    Args args{};
    args.struct_size = sizeof(Args);
    args.abi_version = RSSM_ABI_VERSION;
    for (size_t i = 0; i < ports_.size(); ++i) {
      if (ports_[i].view != nullptr) {
        args.*(ports_[i].view) = denseView(inputDesc[i].dims, ports_[i].dtype, inputs[i]);
      }
    }
    if constexpr (Operation::kResult >= 0) {
      args.*Operation::kResultView = denseView(outputDesc[0].dims, ports_[Operation::kResult].dtype, outputs[0]);
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
  std::vector<Port<Args>> ports_;
  std::vector<int32_t> inPlace_;  // inputs that are updated in place, in order
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

template <class Operation>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() {
    typename Operation::Config config;
    FieldNames names;
    config.visit(names);
    fields_ = names.take();
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
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

}  // namespace replayssm::trt
