// Every plugin in each of its forms, at one small shape.
#include "host.h"
#include "replayssm/tensor.h"

namespace host {
namespace {

constexpr int64_t B = 3, S = 5, T = 2, H = 4, G = 2, P = 64, N = 128, L = 4, C = L + T, K = 2;
constexpr DataType kAct = DataType::kBF16, kFloat = DataType::kFLOAT, kInt = DataType::kINT32, kFp8 = DataType::kFP8;

void appendStep(std::vector<Input>& inputs) {
  for (int i = 0; i < 4; ++i) inputs.push_back({kInt, {B}, false});  // slot, num_tokens, row_flags, carry_index
  inputs.push_back({kInt, {1}, false});                              // phase: a step
  for (int i = 0; i < 3; ++i) inputs.push_back({kInt, {S}, false});  // origin, h, cursor_position
  inputs.push_back({DataType::kINT64, {S}, false});                  // seed
}

void appendCopies(std::vector<Input>& inputs, int32_t recurrence, int32_t read) {
  DataType type = recurrence == RSSM_FLOAT32 ? kFloat : recurrence == RSSM_FLOAT16 ? DataType::kHALF : kFp8;
  inputs.push_back({type, {S, H, P, N}, true});
  if (recurrence == RSSM_FLOAT8_E4M3) inputs.push_back({kFloat, {S, H, P, 1}, true});
  if (read == RSSM_FLOAT16) inputs.push_back({DataType::kHALF, {S, H, P, N}, true});
  if (read == RSSM_FLOAT8_E4M3) {
    inputs.push_back({kFp8, {S, H, P, N}, true});
    inputs.push_back({kFloat, {S, H, P, 1}, true});
  } else if (read == RSSM_FLOAT4_E2M1) {
    inputs.push_back({DataType::kINT8, {S, H, P, N / 2}, true});
    inputs.push_back({kFp8, {S, H, P, N / 16}, true});
    inputs.push_back({kFloat, {S, H}, true});
  }
}

std::vector<Value> replayFields(int32_t recurrence, int32_t read) {
  return {{"heads", H},  {"groups", G}, {"head_dim", P},   {"state_dim", N},     {"window", L}, {"max_step_tokens", T},
          {"recurrence", recurrence},   {"rounding", 1},   {"read", read},       {"layer", 7},  {"head_offset", 0},
          {"activation", RSSM_BFLOAT16}};
}

// x, k and q are channels of one projection, as after the convolution.
Case mamba2(int32_t recurrence, int32_t read) {
  Input projection{kAct, {B, T, H * P + 2 * G * N}, false};
  std::vector<Input> inputs = {projection, projection, projection, {kFloat, {B, T, H}, false}};
  appendStep(inputs);
  inputs.push_back({kFloat, {H}, false});
  inputs.push_back({kFloat, {H}, false});
  appendCopies(inputs, recurrence, read);
  inputs.insert(inputs.end(), {{kAct, {S, H, C, P}, true},
                               {kAct, {S, G, C, N}, true},
                               {kFloat, {S, H, C}, true},
                               {kFloat, {K, H, P, N}, true}});
  std::vector<Value> fields = replayFields(recurrence, read);
  fields.insert(fields.end(),
                {{"x_offset", 0}, {"k_offset", H * P}, {"q_offset", H * P + G * N}, {"dt_offset", 0}});
  return {"Mamba2Replay", fields, inputs, {{kAct, H * P}}};
}

Case gatedDeltaNet(int32_t recurrence, int32_t read) {
  Input projection{kAct, {B, T, H * P + 2 * G * N}, false};
  std::vector<Input> inputs = {projection, projection, projection, {kFloat, {B, T, 2 * H}, false},
                               {kFloat, {B, T, 2 * H}, false}};
  appendStep(inputs);
  appendCopies(inputs, recurrence, read);
  inputs.insert(inputs.end(), {{DataType::kHALF, {S, H, C, P}, true},
                               {kAct, {S, G, C, N}, true},
                               {kFloat, {S, H, C}, true},
                               {kFloat, {S, G, C}, true}});
  if (recurrence != RSSM_FLOAT32 || read != RSSM_NO_DTYPE) {
    inputs.push_back({kAct, {S, H, C, P}, true});
    inputs.push_back({kFloat, {S, H, C}, true});
  }
  inputs.push_back({kFloat, {K, H, P, N}, true});
  std::vector<Value> fields = replayFields(recurrence, read);
  fields.insert(fields.end(), {{"q_offset", 0},
                               {"k_offset", G * N},
                               {"v_offset", 2 * G * N},
                               {"log_decay_offset", 0},
                               {"beta_offset", H}});
  return {"GatedDeltaNetReplay", fields, inputs, {{kAct, H * P}}};
}

Case conv1d() {
  constexpr int64_t D = 48, kTaps = 4;
  std::vector<Input> inputs = {{kAct, {B, T, D + 8}, false}, {kInt, {B}, false}, {kInt, {B}, false}, {kInt, {1}, false},
                               {kInt, {S}, false}, {kFloat, {D, 1, kTaps}, false}, {kFloat, {D}, false},
                               {kAct, {S, kTaps - 1 + T, D}, true}};
  return {"CausalConv1dReplay",
          {{"channels", D}, {"kernel", kTaps}, {"max_step_tokens", T}, {"layer", 7}, {"activation", RSSM_BFLOAT16},
           {"x_offset", 8}},
          inputs, {{kAct, D}}};
}

Case commit() {
  std::vector<Input> inputs = {{kAct, {B, T, 16}, false}};
  for (int i = 0; i < 3; ++i) inputs.push_back({kInt, {B}, false});
  inputs.push_back({kInt, {1}, false});
  for (int i = 0; i < 3; ++i) inputs.push_back({kInt, {S}, true});
  return {"ReplayCommit", {{"window", L}, {"max_step_tokens", T}}, inputs, {}};
}

// The group-limited router; logits lie behind other channels of their projection.
Case route() {
  constexpr int64_t E = 8, kTopK = 2;
  return {"MoeRoute",
          {{"experts", E}, {"top_k", kTopK}, {"router", 1}, {"groups", 2}, {"topk_group", 1}, {"norm_topk", 1},
           real("scaling", 2.5f), {"logits_offset", 1}},
          {{kFloat, {B, T, E + 1}, false}, {kInt, {B}, false}, {kInt, {B}, false}, {kFloat, {E}, false}},
          {{kInt, kTopK}, {kFloat, kTopK}}};
}

// Gated experts; everything lies behind other channels, the weights behind most.
Case experts(int32_t format) {
  constexpr int64_t E = 8, kTopK = 2, kWidth = 64, kInner = 72, kGroups = 2, kDownGroups = 1, kScales = 1024;
  int64_t bytes = format == RSSM_FLOAT4_E2M1 ? 8192 : format == RSSM_FLOAT8_E4M3 ? 16384 : 32768;
  int64_t factors = format == RSSM_FLOAT8_E4M3 ? kInner : 1;
  DataType raw = DataType::kINT8;
  std::vector<Input> inputs = {{kAct, {B, T, kWidth + 16}, false}, {kInt, {B, T, kTopK + 1}, false},
                               {kFloat, {B, T, kTopK + 8}, false}, {raw, {E, kGroups, 1, bytes}, false}};
  if (format == RSSM_FLOAT4_E2M1) inputs.push_back({raw, {E, kGroups, 1, kScales}, false});
  inputs.push_back({kFloat, {E, 2, factors}, false});
  inputs.push_back({raw, {E, kDownGroups, 1, bytes}, false});
  if (format == RSSM_FLOAT4_E2M1) inputs.push_back({raw, {E, kDownGroups, 1, kScales}, false});
  inputs.push_back({kFloat, {E, 1, 1}, false});
  return {"MoeExperts",
          {{"experts", E}, {"top_k", kTopK}, {"width", kWidth}, {"intermediate", kInner}, {"gated", 1},
           {"weight_format", format}, {"activation", RSSM_BFLOAT16}, {"x_offset", 16}, {"ids_offset", 1},
           {"weights_offset", 8}},
          inputs, {{kAct, kWidth}}};
}

}  // namespace

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int32_t recurrence : {RSSM_FLOAT32, RSSM_FLOAT16, RSSM_FLOAT8_E4M3}) {
    for (int32_t read : {RSSM_NO_DTYPE, RSSM_FLOAT16, RSSM_FLOAT8_E4M3, RSSM_FLOAT4_E2M1}) {
      all.push_back(mamba2(recurrence, read));
      all.push_back(gatedDeltaNet(recurrence, read));
    }
  }
  all.push_back(conv1d());
  all.push_back(route());
  for (int32_t format : {RSSM_BFLOAT16, RSSM_FLOAT8_E4M3, RSSM_FLOAT4_E2M1}) all.push_back(experts(format));
  all.push_back(commit());
  return all;
}

}  // namespace host
