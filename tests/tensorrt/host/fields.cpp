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
    refused(c, "a huge", i, [](auto& list, size_t at) { list[at].data = &huge; });
    refused(c, "a negative", i, [](auto& list, size_t at) { list[at].data = &negative; });
    refused(c, "a long", i, [](auto& list, size_t at) { list[at].length = 2; });
  }
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
  if (std::strcmp(c.plugin, "CausalConv1dReplay") == 0) return;  // it has no window
  std::vector<Value> longer = c.fields;
  for (Value& value : longer) {
    if (std::string(value.name) == "max_step_tokens") value.number = 5;  // the window is 4
  }
  Fields wrong(longer);
  collection = wrong.collection();
  CHECK(maker->createPlugin("x", &collection, nvinfer1::TensorRTPhase::kBUILD) == nullptr, "%s accepts T > L", c.plugin);
  CHECK(takeReport().find("T_max <= L") != std::string::npos, "%s", c.plugin);
}

}  // namespace host
