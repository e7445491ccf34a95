// Every plugin in each of its forms, at one small shape.
#include "host.h"

namespace host {
namespace {

constexpr int64_t B = 3, S = 5, T = 2, H = 4, G = 2, P = 64, N = 128, L = 4, C = L + T;
constexpr DataType kAct = DataType::kBF16, kFloat = DataType::kFLOAT, kInt = DataType::kINT32, kBytes = DataType::kINT8;

std::vector<Input> cursors() {
  return {{kInt, {B}, false}, {kInt, {B}, false}, {kInt, {S}, false},
          {kInt, {S}, false}, {kInt, {S}, false}, {DataType::kINT64, {S}, false}};
}

void appendState(std::vector<Input>& inputs, const std::string& recurrence, const std::string& read) {
  DataType type = recurrence == "float32" ? kFloat : recurrence == "float16" ? DataType::kHALF : kBytes;
  inputs.push_back({type, {S, H, P, N}, true});
  if (recurrence == "fp8") inputs.push_back({kFloat, {S, H, P, 1}, true});
  if (read == "fp8") {
    inputs.push_back({kBytes, {S, H, P, N}, true});
    inputs.push_back({kFloat, {S, H, P, 1}, true});
  } else if (read == "nvfp4") {
    inputs.push_back({kBytes, {S, H, P, N / 2}, true});
    inputs.push_back({kBytes, {S, H, P, N / 16}, true});
    inputs.push_back({kFloat, {S, H}, true});
  }
}

std::vector<Value> updateFields(const char* recurrence, const char* read) {
  return {{"window", L, nullptr},          {"max_step_tokens", T, nullptr},   {"layer", 7, nullptr},
          {"head_offset", 0, nullptr},     {"activation", 0, "bfloat16"},     {"recurrence", 0, recurrence},
          {"read", 0, read}};
}

Case mamba2(const char* recurrence, const char* read) {
  std::vector<Input> inputs = cursors();
  inputs.insert(inputs.end(), {{kAct, {B, T, H, P}, false},
                               {kAct, {B, T, G, N}, false},
                               {kAct, {B, T, G, N}, false},
                               {kFloat, {B, T, H}, false},
                               {kFloat, {H}, false},
                               {kFloat, {H}, false}});
  appendState(inputs, recurrence, read);
  inputs.insert(inputs.end(),
                {{kAct, {S, H, C, P}, true}, {kAct, {S, G, C, N}, true}, {kFloat, {S, H, C}, true}});
  return {"Mamba2Replay", updateFields(recurrence, read), inputs, 6};
}

Case gatedDeltaNet(const char* recurrence, const char* read) {
  std::vector<Input> inputs = cursors();
  inputs.insert(inputs.end(), {{kAct, {B, T, H, P}, false},
                               {kAct, {B, T, G, N}, false},
                               {kAct, {B, T, G, N}, false},
                               {kFloat, {B, T, H}, false},
                               {kFloat, {B, T, H}, false}});
  appendState(inputs, recurrence, read);
  inputs.insert(inputs.end(), {{DataType::kHALF, {S, H, C, P}, true},
                               {kAct, {S, G, C, N}, true},
                               {kFloat, {S, H, C}, true},
                               {kFloat, {S, G, C}, true}});
  if (std::string(recurrence) != "float32" || std::string(read) != "none") {
    inputs.push_back({kAct, {S, H, C, P}, true});
    inputs.push_back({kFloat, {S, H, C}, true});
  }
  return {"GatedDeltaNetReplay", updateFields(recurrence, read), inputs, 6};
}

Case commit() {
  return {"ReplayCommit",
          {{"window", L, nullptr}, {"ring_rows", C, nullptr}},
          {{kAct, {B, T, 16}, false},
           {kInt, {B}, false},
           {kInt, {B}, false},
           {kInt, {B}, false},
           {kInt, {S}, true},
           {kInt, {S}, true},
           {kInt, {S}, true}},
          -1};
}

}  // namespace

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* recurrence : {"float32", "float16", "fp8"}) {
    for (const char* read : {"none", "fp8", "nvfp4"}) {
      all.push_back(mamba2(recurrence, read));
      all.push_back(gatedDeltaNet(recurrence, read));
    }
  }
  all.push_back(commit());
  return all;
}

}  // namespace host
