// Every wrong field is refused with a sentence that names it.
#include <functional>

#include "host.h"

namespace host {
namespace {

using Edit = std::function<void(std::vector<PluginField>&, size_t)>;

void refused(const Case& c, const char* what, size_t field, const Edit& edit) {
  Fields fields(c.fields);
  std::string name = c.fields[field].name;
  edit(fields.list(), field);
  PluginFieldCollection collection = fields.collection();
  std::unique_ptr<nvinfer1::IPluginV3> plugin(
      creator(c.plugin)->createPlugin("layer", &collection, nvinfer1::TensorRTPhase::kBUILD));
  std::string report = takeReport();
  CHECK(plugin == nullptr, "%s accepts %s %s", c.plugin, what, name.c_str());
  CHECK(report.find("field " + name) != std::string::npos && report.find("'layer'") != std::string::npos,
        "%s, %s %s: reported '%s'", c.plugin, what, name.c_str(), report.c_str());
}

}  // namespace

void checkFields(const Case& c) {
  static const int32_t huge = 1 << 30, negative = -1;
  static const float hugeReal = 1e30f, negativeReal = -1.0f;
  static const int64_t wide = 4;
  const PluginFieldCollection* names = creator(c.plugin)->getFieldNames();
  CHECK(names->nbFields == static_cast<int32_t>(c.fields.size()), "%s announces %d fields", c.plugin, names->nbFields);
  for (size_t i = 0; i < c.fields.size(); ++i) {
    CHECK(std::string(names->fields[i].name) == c.fields[i].name, "%s announces %s", c.plugin, names->fields[i].name);
    refused(c, "a missing", i, [](auto& list, size_t at) { list.erase(list.begin() + static_cast<long>(at)); });
    refused(c, "a repeated", i, [](auto& list, size_t at) { list.push_back(list[at]); });
    refused(c, "a null", i, [](auto& list, size_t at) { list[at].data = nullptr; });
    refused(c, "a wide", i, [](auto& list, size_t at) {
      list[at] = PluginField(list[at].name, &wide, PluginFieldType::kINT64, 1);
    });
    bool isReal = c.fields[i].type == PluginFieldType::kFLOAT32;
    const void *large = isReal ? static_cast<const void*>(&hugeReal) : &huge;
    const void *small = isReal ? static_cast<const void*>(&negativeReal) : &negative;
    refused(c, "a huge", i, [large](auto& list, size_t at) { list[at].data = large; });
    refused(c, "a negative", i, [small](auto& list, size_t at) { list[at].data = small; });
    refused(c, "a mistyped", i, [isReal](auto& list, size_t at) {
      list[at].type = isReal ? PluginFieldType::kINT32 : PluginFieldType::kFLOAT32;
    });
    refused(c, "a long", i, [](auto& list, size_t at) { list[at].length = 2; });
  }
}

// Values that are in range each and contradict one another: name, value and a part of the sentence.
struct Contradiction {
  const char *name;
  int32_t value;
  const char *reason;
};

std::vector<Contradiction> contradictions(const char* plugin) {
  std::string name = plugin;
  if (name == "CausalConv1dReplay") return {};
  if (name == "MoeRoute") {
    return {{"top_k", 9, "the 8 experts"}, {"groups", 3, "divisor of the 8 experts"}, {"topk_group", 3, "the 2 groups"},
            {"router", 0, "1 with softmax"}};
  }
  if (name == "MoeExperts") {
    return {{"top_k", 9, "the 8 experts"}, {"width", 68, "multiple of 8"}, {"intermediate", 20, "multiple of 8"}};
  }
  return {{"max_step_tokens", 5, "T_max <= L"}};  // the window is 4
}

void checkRefusals(const Case& c) {
  Fields fields(c.fields);
  static const int32_t one = 1;
  fields.list().emplace_back("windw", &one, PluginFieldType::kINT32, 1);
  PluginFieldCollection collection = fields.collection();
  nvinfer1::IPluginCreatorV3One* maker = creator(c.plugin);
  std::unique_ptr<nvinfer1::IPluginV3> plugin(maker->createPlugin("x", &collection, nvinfer1::TensorRTPhase::kBUILD));
  CHECK(plugin == nullptr && takeReport().find("field windw") != std::string::npos, "%s accepts an unknown field", c.plugin);
  CHECK(maker->createPlugin("x", nullptr, nvinfer1::TensorRTPhase::kBUILD) == nullptr, "%s accepts no fields", c.plugin);
  CHECK(takeReport().find("missing") != std::string::npos, "%s", c.plugin);
  for (const Contradiction& wrong : contradictions(c.plugin)) {
    std::vector<Value> values = c.fields;
    for (Value& value : values) {
      if (std::strcmp(value.name, wrong.name) == 0) value.number = wrong.value;
    }
    Fields given(values);
    collection = given.collection();
    CHECK(maker->createPlugin("x", &collection, nvinfer1::TensorRTPhase::kBUILD) == nullptr, "%s accepts %s %d", c.plugin,
          wrong.name, wrong.value);
    std::string report = takeReport();
    CHECK(report.find(wrong.reason) != std::string::npos, "%s, %s: reported '%s'", c.plugin, wrong.name, report.c_str());
  }
}

}  // namespace host
