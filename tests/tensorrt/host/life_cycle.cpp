// A plugin's life as TensorRT drives it: create, clone, shapes, formats, configure, attach, serialise, recreate, enqueue.
#include <algorithm>

#include "expressions.h"
#include "host.h"
#include "replayssm/tensor.h"

namespace host {
namespace {

using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;

struct Parts {
  nvinfer1::IPluginV3OneCore* core;
  nvinfer1::IPluginV3OneBuildV2* build;
  nvinfer1::IPluginV3OneRuntime* runtime;
};

Parts partsOf(nvinfer1::IPluginV3& plugin) {
  using Type = nvinfer1::PluginCapabilityType;
  return {static_cast<nvinfer1::IPluginV3OneCore*>(plugin.getCapabilityInterface(Type::kCORE)),
          static_cast<nvinfer1::IPluginV3OneBuildV2*>(plugin.getCapabilityInterface(Type::kBUILD)),
          static_cast<nvinfer1::IPluginV3OneRuntime*>(plugin.getCapabilityInterface(Type::kRUNTIME))};
}

std::vector<DynamicPluginTensorDesc> describe(const Case& c) {
  std::vector<DynamicPluginTensorDesc> all;
  auto add = [&](const Input& input) {
    DynamicPluginTensorDesc desc{};
    desc.desc = descOf(input);
    desc.min = desc.max = desc.opt = desc.desc.dims;
    all.push_back(desc);
  };
  for (const Input& input : c.inputs) add(input);
  for (const Input& output : outputsOf(c)) add(output);
  return all;
}

void checkOutputs(const Case& c, const Parts& parts) {
  std::vector<int32_t> sources = outputSources(c);
  std::vector<Input> outputs = outputsOf(c);
  int32_t numInputs = static_cast<int32_t>(c.inputs.size()), numOutputs = static_cast<int32_t>(sources.size());
  CHECK(parts.build->getNbOutputs() == numOutputs, "%s: %d outputs", c.plugin, parts.build->getNbOutputs());
  std::vector<DataType> in, out(sources.size(), DataType::kBOOL);
  for (const Input& input : c.inputs) in.push_back(input.type);
  CHECK(parts.build->getOutputDataTypes(out.data(), numOutputs, in.data(), numInputs) == 0, "%s", c.plugin);
  Expressions expressions;
  std::vector<nvinfer1::DimsExprs> dims(c.inputs.size()), result(sources.size());
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    dims[i].nbDims = static_cast<int32_t>(c.inputs[i].dims.size());
    for (int32_t d = 0; d < dims[i].nbDims; ++d) {
      dims[i].d[d] = expressions.constant(c.inputs[i].dims[static_cast<size_t>(d)]);
    }
  }
  CHECK(parts.build->getOutputShapes(dims.data(), numInputs, nullptr, 0, result.data(), numOutputs, expressions) == 0,
        "%s", c.plugin);
  for (size_t i = 0; i < sources.size(); ++i) {
    int32_t aliased = parts.build->getAliasedInput(static_cast<int32_t>(i));
    CHECK(aliased == sources[i], "%s: output %zu aliases %d", c.plugin, i, aliased);
    CHECK(out[i] == outputs[i].type, "%s: output %zu has type %d", c.plugin, i, static_cast<int>(out[i]));
    CHECK(result[i].nbDims == static_cast<int32_t>(outputs[i].dims.size()), "%s: output %zu", c.plugin, i);
    for (int32_t d = 0; d < result[i].nbDims; ++d) {
      CHECK(result[i].d[d]->getConstantValue() == outputs[i].dims[static_cast<size_t>(d)], "%s: output %zu", c.plugin, i);
    }
  }
}

void checkFormats(const Case& c, const Parts& parts) {
  std::vector<DynamicPluginTensorDesc> all = describe(c);
  int32_t numInputs = static_cast<int32_t>(c.inputs.size());
  int32_t numOutputs = static_cast<int32_t>(all.size()) - numInputs;
  for (int32_t i = 0; i < numInputs + numOutputs; ++i) {
    CHECK(parts.build->supportsFormatCombination(i, all.data(), numInputs, numOutputs), "%s: position %d", c.plugin, i);
    std::vector<DynamicPluginTensorDesc> wrong = all;
    wrong[static_cast<size_t>(i)].desc.format = nvinfer1::TensorFormat::kCHW32;
    CHECK(!parts.build->supportsFormatCombination(i, wrong.data(), numInputs, numOutputs), "%s: format at %d", c.plugin, i);
    bool anyType = std::strcmp(c.plugin, "ReplayCommit") == 0 && i == 0;
    wrong = all;
    wrong[static_cast<size_t>(i)].desc.type = DataType::kBOOL;
    CHECK(parts.build->supportsFormatCombination(i, wrong.data(), numInputs, numOutputs) == anyType, "%s: type at %d",
          c.plugin, i);
  }
  // The workspace of a prompt depends on the GPU; without one that, and nothing else, is what configure may complain of.
  bool configured = parts.build->configurePlugin(all.data(), numInputs, all.data() + numInputs, numOutputs) == 0;
  std::string complaint = takeReport();
  CHECK(configured || complaint.find("workspace: launch: CUDA driver") != std::string::npos, "%s: %s", c.plugin,
        complaint.c_str());
  CHECK(parts.build->configurePlugin(all.data(), numInputs - 1, all.data(), numOutputs) != 0, "%s: count", c.plugin);
  CHECK(takeReport().find("inputs") != std::string::npos, "%s: no report of a wrong count", c.plugin);
  std::vector<DynamicPluginTensorDesc> flat = all;
  flat[static_cast<size_t>(numInputs) - 1].desc.dims.nbDims = 7;
  CHECK(parts.build->configurePlugin(flat.data(), numInputs, flat.data() + numInputs, numOutputs) != 0, "%s", c.plugin);
  CHECK(takeReport().find("rank") != std::string::npos, "%s: no report of a wrong rank", c.plugin);
  CHECK(parts.build->getWorkspaceSize(all.data(), numInputs, all.data() + numInputs, numOutputs) < 1 << 20, "%s",
        c.plugin);
}

// enqueue with pointers that are never read: an empty step succeeds, outputs that are not in place are refused, and so
// are channels beyond a projection.
void checkEnqueue(const Case& c, const Parts& parts) {
  std::vector<PluginTensorDesc> in, out;
  std::vector<const void*> inputs(c.inputs.size());
  std::vector<void*> outputs(outputSources(c).size());
  alignas(256) static char memory[256];
  for (const Input& input : c.inputs) in.push_back(descOf(input));
  for (const Input& output : outputsOf(c)) out.push_back(descOf(output));
  inputs.assign(inputs.size(), static_cast<const void*>(memory));
  outputs.assign(outputs.size(), static_cast<void*>(memory));
  int32_t numInputs = static_cast<int32_t>(in.size()), numOutputs = static_cast<int32_t>(out.size());
  auto enqueue = [&] { return parts.runtime->enqueue(in.data(), out.data(), inputs.data(), outputs.data(), memory, nullptr); };
  CHECK(parts.runtime->onShapeChange(in.data(), numInputs, out.data(), numOutputs) == 0, "%s", c.plugin);
  if (outputSources(c).back() >= 0) {
    outputs.back() = memory + 128;
    CHECK(enqueue() != 0, "%s", c.plugin);
    CHECK(takeReport().find("ALIASED_PLUGIN_IO") != std::string::npos, "%s: no report of two addresses", c.plugin);
    outputs.back() = memory;
  }
  if (c.results.empty()) return;
  std::vector<PluginTensorDesc> narrow = in;
  narrow[c.inputs[2].dims.size() == 3 ? 2 : 0].dims.d[2] -= 8;  // the one whose range ends last
  CHECK(parts.runtime->onShapeChange(narrow.data(), numInputs, out.data(), numOutputs) != 0, "%s", c.plugin);
  CHECK(takeReport().find("channels") != std::string::npos, "%s: no report of a narrow projection", c.plugin);
  for (PluginTensorDesc& desc : in) {
    if (desc.dims.d[0] == out[0].dims.d[0]) desc.dims.d[0] = 0;  // the axis of the rows; no other has its extent
  }
  for (size_t i = 0; i < c.results.size(); ++i) out[i].dims.d[0] = 0;
  bool recurrence = c.fields.size() > 6 && std::strcmp(c.fields[6].name, "recurrence") == 0;
  bool built = !recurrence || (c.fields[6].number == RSSM_FLOAT32 && c.fields[8].number == RSSM_NO_DTYPE);
  if (built) CHECK(enqueue() == 0, "%s: an empty batch: %s", c.plugin, lastReport().c_str());
}

// A step longer than the plugin was made for, and an extent of `phase` that says neither step nor prompt, are refused
// before anything is read.
void checkPhase(const Case& c, const Parts& parts) {
  std::vector<PluginTensorDesc> in, out;
  alignas(256) static char memory[256];
  for (const Input& input : c.inputs) in.push_back(descOf(input));
  for (const Input& output : outputsOf(c)) out.push_back(descOf(output));
  std::vector<const void*> inputs(in.size(), static_cast<const void*>(memory));
  std::vector<void*> outputs(out.size(), static_cast<void*>(memory));
  auto refused = [&](const char* reason) {
    int32_t failed = parts.runtime->enqueue(in.data(), out.data(), inputs.data(), outputs.data(), memory, nullptr);
    std::string text = takeReport();
    CHECK(failed != 0 && text.find(reason) != std::string::npos, "%s: '%s'", c.plugin, text.c_str());
  };
  auto phase = std::find_if(c.inputs.begin(), c.inputs.end(),
                            [](const Input& i) { return i.type == DataType::kINT32 && i.dims.size() == 1 && i.dims[0] == 1; });
  if (phase == c.inputs.end()) return;
  PluginTensorDesc& extent = in[static_cast<size_t>(phase - c.inputs.begin())];
  extent.dims.d[0] = 3;
  refused("expected an extent of 1 (step) or 2 (prompt chunk), got 3");
  extent.dims.d[0] = 1;
  if (c.results.empty()) return;  // the commit: lengths are read on the device
  for (PluginTensorDesc& desc : in) {
    if (desc.dims.nbDims == 3 && desc.dims.d[0] == in[0].dims.d[0]) ++desc.dims.d[1];
  }
  refused("at most max_step_tokens");
}

std::vector<std::string> fieldTexts(nvinfer1::IPluginV3OneRuntime& runtime) {
  std::vector<std::string> texts;
  const PluginFieldCollection* fields = runtime.getFieldsToSerialize();
  for (int32_t i = 0; i < fields->nbFields; ++i) {
    const PluginField& field = fields->fields[i];
    int32_t value = 0;
    std::memcpy(&value, field.data, sizeof(value));
    texts.push_back(std::string(field.name) + "=" + std::to_string(value));
  }
  return texts;
}

}  // namespace

void checkLifeCycle(const Case& c) {
  Fields fields(c.fields);
  PluginFieldCollection collection = fields.collection();
  nvinfer1::IPluginCreatorV3One* maker = creator(c.plugin);
  std::unique_ptr<nvinfer1::IPluginV3> plugin(maker->createPlugin("layer", &collection, nvinfer1::TensorRTPhase::kBUILD));
  CHECK(plugin != nullptr, "%s: %s", c.plugin, lastReport().c_str());
  if (plugin == nullptr) return;
  Parts parts = partsOf(*plugin);
  CHECK(std::string(parts.core->getPluginName()) == c.plugin, "%s", parts.core->getPluginName());
  CHECK(std::string(parts.core->getPluginNamespace()) == "replayssm", "%s", parts.core->getPluginNamespace());
  CHECK(std::string(parts.build->getInterfaceInfo().kind) == "PLUGIN_V3ONE_BUILD", "%s", c.plugin);
  CHECK(parts.build->getInterfaceInfo().major == 2, "%s: build interface without aliasing", c.plugin);
  checkOutputs(c, parts);
  checkFormats(c, parts);
  std::unique_ptr<nvinfer1::IPluginV3> copy(plugin->clone());
  std::vector<std::string> texts = fieldTexts(*parts.runtime);
  CHECK(texts == fieldTexts(*partsOf(*copy).runtime), "%s: a clone has other fields", c.plugin);
  std::unique_ptr<nvinfer1::IPluginV3> again(maker->createPlugin("layer", parts.runtime->getFieldsToSerialize(),
                                                                 nvinfer1::TensorRTPhase::kRUNTIME));
  plugin.reset();  // nothing made from it may look back
  CHECK(again != nullptr, "%s: not recreated: %s", c.plugin, lastReport().c_str());
  if (again == nullptr) return;
  CHECK(texts == fieldTexts(*partsOf(*again).runtime), "%s: other fields after the round trip", c.plugin);
  std::unique_ptr<nvinfer1::IPluginV3> attached(partsOf(*copy).runtime->attachToContext(nullptr));
  CHECK(attached != nullptr && attached != copy, "%s", c.plugin);
  checkEnqueue(c, partsOf(*attached));
  checkPhase(c, partsOf(*attached));
}

}  // namespace host
