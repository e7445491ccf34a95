#include "program.h"

namespace host {
namespace {

// The plugin's inputs and dense outputs as a network would describe them.
Case caseOf(const Description& all, const Call& call) {
  Case c{call.plugin.c_str(), call.fields, {}, {}};
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    c.inputs.push_back(all.tensors[static_cast<size_t>(call.inputs[i])]);
    c.inputs.back().inPlace = call.inPlace[i];
  }
  for (int32_t result : call.results) {
    const Input& tensor = all.tensors[static_cast<size_t>(result)];
    c.results.push_back({tensor.type, tensor.dims[2]});
  }
  return c;
}

}  // namespace

bool Layer::open(const Description& all, const Call& call, const std::vector<void*>& memory, const Layer* other) {
  const Case c = caseOf(all, call);
  Fields fields(c.fields);
  PluginFieldCollection collection = fields.collection();
  plugin_.reset(other != nullptr
                    ? other->runtime_->attachToContext(nullptr)
                    : creator(c.plugin)->createPlugin("run", &collection, nvinfer1::TensorRTPhase::kRUNTIME));
  if (plugin_ == nullptr) return std::printf("FAILED %s\n", lastReport().c_str()), false;
  using Type = nvinfer1::PluginCapabilityType;
  runtime_ = static_cast<nvinfer1::IPluginV3OneRuntime*>(plugin_->getCapabilityInterface(Type::kRUNTIME));
  auto* build = static_cast<nvinfer1::IPluginV3OneBuildV2*>(plugin_->getCapabilityInterface(Type::kBUILD));
  for (const Input& input : c.inputs) in_.push_back(descOf(input));
  for (const Input& output : outputsOf(c)) out_.push_back(descOf(output));
  std::vector<nvinfer1::DynamicPluginTensorDesc> tensors;
  for (const auto* list : {&in_, &out_}) {
    for (const nvinfer1::PluginTensorDesc& desc : *list) tensors.push_back({desc, desc.dims, desc.dims, desc.dims});
  }
  int32_t numInputs = static_cast<int32_t>(in_.size()), numOutputs = static_cast<int32_t>(out_.size());
  const nvinfer1::DynamicPluginTensorDesc* outputs = tensors.data() + numInputs;
  if (build->configurePlugin(tensors.data(), numInputs, outputs, numOutputs) != 0) {
    return std::printf("FAILED configurePlugin: %s\n", lastReport().c_str()), false;
  }
  workspaceBytes_ = build->getWorkspaceSize(tensors.data(), numInputs, outputs, numOutputs);
  for (int32_t tensor : call.inputs) inputs_.push_back(memory[static_cast<size_t>(tensor)]);
  for (int32_t tensor : call.results) outputs_.push_back(memory[static_cast<size_t>(tensor)]);
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    if (call.inPlace[i]) outputs_.push_back(memory[static_cast<size_t>(call.inputs[i])]);
  }
  return good(cudaMalloc(&workspace_, workspaceBytes_ + 256), "cudaMalloc");
}

bool Layer::enqueue(cudaStream_t stream) {
  int32_t failed = runtime_->enqueue(in_.data(), out_.data(), inputs_.data(), outputs_.data(), workspace_, stream);
  if (failed != 0) std::printf("FAILED enqueue: %s\n", lastReport().c_str());
  return failed == 0;
}

bool Layer::spoil() { return good(cudaMemset(workspace_, 0x7f, workspaceBytes_), "garbage"); }

bool Program::open(const Program* other) {
  for (const Input& tensor : all_.tensors) {
    void* data = nullptr;
    if (!good(cudaMalloc(&data, bytesOf(tensor) + 256), "cudaMalloc")) return false;
    memory_.push_back(data);
  }
  for (size_t i = 0; i < all_.calls.size(); ++i) {
    const Layer* first = other == nullptr ? nullptr : &other->layers_[i];
    layers_.emplace_back();
    if (!layers_.back().open(all_, all_.calls[i], memory_, first)) return false;
  }
  return good(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
}

bool Program::spoil(int kind) {
  for (size_t i = 0; i < memory_.size(); ++i) {
    std::vector<char> data = garbage(all_.tensors[i], kind, static_cast<uint32_t>(i));
    if (!good(cudaMemcpy(memory_[i], data.data(), data.size(), cudaMemcpyHostToDevice), "garbage")) return false;
  }
  for (Layer& layer : layers_) {
    if (!layer.spoil()) return false;
  }
  return good(cudaDeviceSynchronize(), "garbage");
}

bool Program::enqueue() {
  for (Layer& layer : layers_) {
    if (!layer.enqueue(stream_)) return false;
  }
  return true;
}

bool Program::run() {
  if (replay_ != nullptr ? !good(cudaGraphLaunch(replay_, stream_), "replay") : !enqueue()) return false;
  return good(cudaStreamSynchronize(stream_), "step");
}

bool Program::capture() {
  cudaGraph_t graph = nullptr;
  return good(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture") && enqueue() &&
         good(cudaStreamEndCapture(stream_, &graph), "end of capture") &&
         good(cudaGraphInstantiate(&replay_, graph, 0), "graph");
}

}  // namespace host
