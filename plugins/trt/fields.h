// Plugin fields: strict parsing, description and serialisation from one list per plugin.
//
// A plugin's config struct has `template <class Visitor> void visit(Visitor&)`, which names every field once:
//     visitor.integer("window", window, 1, 64);
//     visitor.choice("activation", activation, {"bfloat16", "float16"});
// Every field is required, unknown and repeated ones are refused. Integers are one int32; choices are characters without
// a terminator (one trailing NUL is accepted: some hosts append it).
#pragma once

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

// A choice of words, kept as its place in the list.
struct Choice {
  int32_t index = 0;
  std::string word;
};

// Names and types, for a creator's getFieldNames.
class FieldNames {
 public:
  void integer(const char* name, int32_t&, int32_t, int32_t) {
    fields_.emplace_back(name, nullptr, PluginFieldType::kINT32, 1);
  }
  void choice(const char* name, Choice&, std::initializer_list<const char*>) {
    fields_.emplace_back(name, nullptr, PluginFieldType::kCHAR, 0);
  }
  std::vector<PluginField> take() { return std::move(fields_); }

 private:
  std::vector<PluginField> fields_;
};

// Values, for getFieldsToSerialize: they point into the visited config, which must outlive them.
class FieldValues {
 public:
  void integer(const char* name, int32_t& value, int32_t, int32_t) {
    fields_.emplace_back(name, &value, PluginFieldType::kINT32, 1);
  }
  void choice(const char* name, Choice& value, std::initializer_list<const char*>) {
    fields_.emplace_back(name, value.word.data(), PluginFieldType::kCHAR, static_cast<int32_t>(value.word.size()));
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
    const PluginField* field = find(name, PluginFieldType::kINT32, "one int32");
    if (field == nullptr) return;
    if (field->length != 1) return refuse(name, "expected one int32, got %d", field->length);
    std::memcpy(&value, field->data, sizeof(value));
    if (value < low || value > high) refuse(name, "expected %d..%d, got %d", low, high, value);
  }

  void choice(const char* name, Choice& value, std::initializer_list<const char*> words) {
    const PluginField* field = find(name, PluginFieldType::kCHAR, "characters");
    if (field == nullptr) return;
    if (field->length < 0) return refuse(name, "expected a length of 0 or more, got %d", field->length);
    std::string got(static_cast<const char*>(field->data), static_cast<size_t>(field->length));
    if (!got.empty() && got.back() == '\0') got.pop_back();
    std::string options;
    int32_t index = 0;
    for (const char* word : words) {
      if (got == word) {
        value = {index, got};
        return;
      }
      options += options.empty() ? word : std::string(" | ") + word;
      ++index;
    }
    refuse(name, "expected %s, got '%.40s'", options.c_str(), got.c_str());
  }

  // Refuses what no visit asked for. True when everything was accepted.
  bool finish() {
    for (int32_t i = 0; ok() && i < count(); ++i) {
      const PluginField& field = fields_->fields[i];
      const char* name = field.name == nullptr ? "(null)" : field.name;
      int32_t times = 0;
      for (const char* asked : asked_) times += std::strcmp(asked, name) == 0;
      if (times == 0) refuse(name, "no such field; expected %s", joined().c_str());
    }
    return ok();
  }

  bool ok() const { return error_.status == RSSM_OK; }
  const rssm_error& error() const { return error_; }

 private:
  int32_t count() const { return fields_ == nullptr || fields_->fields == nullptr ? 0 : fields_->nbFields; }

  const PluginField* find(const char* name, PluginFieldType type, const char* what) {
    asked_.push_back(name);
    if (!ok()) return nullptr;
    const PluginField* found = nullptr;
    for (int32_t i = 0; i < count(); ++i) {
      const PluginField& field = fields_->fields[i];
      if (field.name == nullptr || std::strcmp(field.name, name) != 0) continue;
      if (found != nullptr) {
        refuse(name, "given twice");
        return nullptr;
      }
      found = &field;
    }
    if (found == nullptr) {
      refuse(name, "missing, expected %s", what);
      return nullptr;
    }
    if (found->type != type) {
      refuse(name, "expected %s, got field type %d", what, static_cast<int32_t>(found->type));
      return nullptr;
    }
    if (found->data == nullptr) {
      refuse(name, "expected %s, got a null pointer", what);
      return nullptr;
    }
    return found;
  }

  template <class... Values>
  void refuse(const char* name, const char* format, Values... values) {
    if (!ok()) return;
    char reason[RSSM_ERROR_CHARS];
    std::snprintf(reason, sizeof(reason), format, values...);
    error_ = failure(RSSM_INVALID_ARGUMENT, "field %s: %s", name, reason);
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
