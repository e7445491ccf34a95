// Plugin fields: strict parsing, description and serialisation from one list per plugin.
//
// A plugin's config struct has `template <class Visitor> void visit(Visitor&)`, which names every field once:
//     visitor.integer("window", window, 1, 64);
//     visitor.code("activation", activation, {RSSM_FLOAT16, RSSM_BFLOAT16});
//     visitor.real("scaling", scaling, 0.0f, 1.0f);
// Every field is one int32, or one float32 where it is real, and required; unknown and repeated ones are refused.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "NvInferRuntime.h"
#include "trt/log.h"

namespace replayssm::trt {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

// Names, types and the places of the values: for a creator's getFieldNames and for getFieldsToSerialize. The visited
// config must outlive the list.
class FieldList {
 public:
  void integer(const char* name, int32_t& value, int32_t, int32_t) {
    fields_.emplace_back(name, &value, PluginFieldType::kINT32, 1);
  }
  void code(const char* name, int32_t& value, std::initializer_list<int32_t>) { integer(name, value, 0, 0); }
  void real(const char* name, float& value, float, float) {
    fields_.emplace_back(name, &value, PluginFieldType::kFLOAT32, 1);
  }
  std::vector<PluginField> take() { return std::move(fields_); }

 private:
  std::vector<PluginField> fields_;
};

// Fills the visited config from a collection; the first failure stays in `error`.
class FieldParser {
 public:
  explicit FieldParser(const PluginFieldCollection* fields) : fields_(fields) {}

  void integer(const char* name, int32_t& value, int32_t low, int32_t high) {
    if (!read(name, PluginFieldType::kINT32, "int32", value)) return;
    if (value < low || value > high) refuse(name, "expected %d..%d, got %d", low, high, value);
  }

  void real(const char* name, float& value, float low, float high) {
    if (!read(name, PluginFieldType::kFLOAT32, "float32", value)) return;
    if (!(value >= low && value <= high)) refuse(name, "expected %g..%g, got %g", low, high, value);
  }

  void code(const char* name, int32_t& value, std::initializer_list<int32_t> codes) {
    if (!read(name, PluginFieldType::kINT32, "int32", value)) return;
    std::string options;
    for (int32_t option : codes) {
      if (value == option) return;
      options += (options.empty() ? "" : " | ") + std::to_string(option);
    }
    refuse(name, "expected %s, got %d", options.c_str(), value);
  }

  // Refuses what no visit asked for. True when everything was accepted.
  bool finish() {
    for (int32_t i = 0; ok() && i < count(); ++i) {
      const char* name = fields_->fields[i].name == nullptr ? "(null)" : fields_->fields[i].name;
      bool known = false;
      for (const char* asked : asked_) known = known || std::strcmp(asked, name) == 0;
      if (!known) refuse(name, "no such field; expected %s", joined().c_str());
    }
    return ok();
  }

  bool ok() const { return error_.status == RSSM_OK; }
  const rssm_error& error() const { return error_; }

 private:
  int32_t count() const { return fields_ == nullptr || fields_->fields == nullptr ? 0 : fields_->nbFields; }

  template <class Number>
  bool read(const char* name, PluginFieldType type, const char* typeName, Number& value) {
    asked_.push_back(name);
    if (!ok()) return false;
    const PluginField* found = nullptr;
    for (int32_t i = 0; i < count(); ++i) {
      const PluginField& field = fields_->fields[i];
      if (field.name == nullptr || std::strcmp(field.name, name) != 0) continue;
      if (found != nullptr) return refuse(name, "given twice");
      found = &field;
    }
    if (found == nullptr) return refuse(name, "missing, expected one %s", typeName);
    if (found->type != type || found->length != 1 || found->data == nullptr) {
      return refuse(name, "expected one %s, got %d of field type %d at %p", typeName, found->length,
                    static_cast<int32_t>(found->type), found->data);
    }
    std::memcpy(&value, found->data, sizeof(value));
    return true;
  }

  __attribute__((format(printf, 3, 4))) bool refuse(const char* name, const char* format, ...) {
    if (!ok()) return false;
    char reason[RSSM_ERROR_CHARS];
    va_list values;
    va_start(values, format);
    std::vsnprintf(reason, sizeof(reason), format, values);
    va_end(values);
    error_ = failure(RSSM_INVALID_ARGUMENT, "field %s: %s", name, reason);
    return false;
  }

  std::string joined() const {
    std::string names;
    for (const char* name : asked_) names += names.empty() ? name : std::string(", ") + name;
    return names;
  }

  const PluginFieldCollection* fields_;
  std::vector<const char*> asked_;
  rssm_error error_{};
};

}  // namespace replayssm::trt
