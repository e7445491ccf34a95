// Times the operations around the recurrence over the C ABI, cold L2, and prints JSON lines: microseconds, bytes that
// must move, and the share of the copy bandwidth of the same run. Correctness is the tests' business (tests/native).
//   replayssm_ops_bench [batch sizes, comma separated] [shape name]
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "bench/cases.h"
#include "bench/ops_support.h"
#include "replayssm/commit.h"
#include "replayssm/gated_rms_norm.h"
#include "replayssm/slots.h"
#include "replayssm/ssm_inputs.h"
#include "replayssm/state_io.h"

namespace {

int64_t innerOf(const Shape& s) { return static_cast<int64_t>(s.heads) * s.headDim; }
int64_t channelsOf(const Shape& s) { return innerOf(s) + 2 * static_cast<int64_t>(s.groups) * s.stateDim; }

constexpr int64_t kTaps = 4;
constexpr int64_t kColdBytes = int64_t{400} << 20;  // what the rotated sets of buffers hold: several times the L2
constexpr int kMaxRotations = 512;

int rotationsFor(double bytes) {
  const double wanted = std::ceil(static_cast<double>(kColdBytes) / bytes);
  return wanted < 1 ? 1 : wanted > kMaxRotations ? kMaxRotations : static_cast<int>(wanted);
}

// Convolution alone and with the decay inputs: steps and prompts.
void benchInputs(const Reporter& report, const Shape& shape, int64_t rows, int64_t tokens, bool prompt) {
  const bool gdn = shape.kind == RSSM_GDN;
  const int64_t channels = channelsOf(shape), heads = shape.heads, ringRows = kTaps - 1 + (prompt ? 1 : tokens);
  const double moved = 2.0 * channels * (2 * tokens + kTaps - 1 + std::min(tokens, ringRows));
  const double decay = tokens * heads * (gdn ? 12.0 : 6.0);
  const double bytes = rows * moved + channels * 4.0 * (kTaps + 1);
  const int rotations = rotationsFor(rows * moved);
  Pool pool;
  std::vector<rssm_ssm_inputs_args> sets(static_cast<size_t>(rotations));
  const rssm_tensor weight = pool.real({channels, kTaps}), bias = pool.real({channels});
  const rssm_tensor headBias = pool.real({heads}), aLog = pool.real({heads});
  const rssm_tensor count = pool.same(rows, static_cast<int32_t>(tokens)), position = pool.same(rows, 1000);
  const rssm_tensor slot = pool.counting(rows);
  for (rssm_ssm_inputs_args& a : sets) {
    a = {};
    a.struct_size = sizeof(a);
    a.abi_version = a.conv.abi_version = RSSM_ABI_VERSION;
    a.kind = shape.kind;
    a.dt_high = INFINITY;
    a.conv.struct_size = sizeof(a.conv);
    a.conv.slot = slot;
    a.conv.num_tokens = count;
    a.conv.position = position;
    a.conv.x = pool.act({rows, tokens, channels});
    a.conv.weight = weight;
    a.conv.bias = bias;
    a.conv.window = pool.act({rows, ringRows, channels});
    a.conv.out = pool.act({rows, tokens, channels});
    a.decay_in = pool.act({rows, tokens, heads});
    a.dt_bias = headBias;
    a.decay_out = pool.real({rows, tokens, heads});
    if (gdn) {
      a.beta_in = pool.act({rows, tokens, heads});
      a.a_log = aLog;
      a.beta_out = pool.real({rows, tokens, heads});
    }
  }
  for (bool programmatic : {false, true}) {
    if (programmatic && (prompt || rows > 8)) continue;
    for (rssm_ssm_inputs_args& a : sets) a.conv.flags = programmatic ? RSSM_CONV1D_PROGRAMMATIC_LAUNCH : 0;
    auto alone = [&](int i) {
      rssm_error error{};
      const rssm_conv1d_args& a = sets[static_cast<size_t>(i)].conv;
      ok((prompt ? rssm_conv1d_prefill : rssm_conv1d_update)(&a, report.stream, &error), error);
    };
    auto fused = [&](int i) {
      rssm_error error{};
      const rssm_ssm_inputs_args& a = sets[static_cast<size_t>(i)];
      ok((prompt ? rssm_ssm_inputs_prefill : rssm_ssm_inputs_update)(&a, report.stream, &error), error);
    };
    report(prompt ? "conv1d_prefill" : "conv1d_update", shape.name, rows, tokens, programmatic, bytes, rotations, alone);
    report(prompt ? "ssm_inputs_prefill" : "ssm_inputs_update", shape.name, rows, tokens, programmatic,
           bytes + rows * decay, rotations, fused);
  }
}

void benchNorm(const Reporter& report, const Shape& shape, int64_t rows, int64_t tokens) {
  const bool gdn = shape.kind == RSSM_GDN;
  const int64_t width = innerOf(shape);
  const double bytes = 6.0 * rows * tokens * width;
  const int rotations = rotationsFor(bytes);
  Pool pool;
  std::vector<rssm_gated_rms_norm_args> sets(static_cast<size_t>(rotations));
  const rssm_tensor weight = pool.real({gdn ? shape.headDim : width});
  for (rssm_gated_rms_norm_args& a : sets) {
    a = {};
    a.struct_size = sizeof(a);
    a.abi_version = RSSM_ABI_VERSION;
    a.groups = static_cast<int32_t>(gdn ? shape.heads : shape.groups);
    a.gate_first = gdn ? 0 : 1;
    a.eps = 1e-5f;
    a.x = pool.act({rows, tokens, width});
    a.gate = pool.act({rows, tokens, width});
    a.weight = weight;
    a.out = pool.act({rows, tokens, width});
  }
  for (bool programmatic : {false, true}) {
    if (programmatic && rows > 8) continue;
    for (rssm_gated_rms_norm_args& a : sets) a.flags = programmatic ? RSSM_NORM_PROGRAMMATIC_LAUNCH : 0;
    report("gated_rms_norm", shape.name, rows, tokens, programmatic, bytes, rotations, [&](int i) {
      rssm_error error{};
      ok(rssm_gated_rms_norm(&sets[static_cast<size_t>(i)], report.stream, &error), error);
    });
  }
}

// Clearing, exporting a full window and importing of `rows` float32 states.
void benchStates(const Reporter& report, const Shape& shape, int64_t rows) {
  constexpr int64_t kWindow = 16, kRing = 17;
  const bool gdn = shape.kind == RSSM_GDN;
  const int64_t h = shape.heads, g = shape.groups, p = shape.headDim, n = shape.stateDim;
  const double state = 4.0 * h * p * n, record = 2.0 * h * p + 2.0 * g * n + 4.0 * h;
  const int rotations = rotationsFor(2 * rows * state);
  const int64_t slots = rows * rotations;
  Pool pool;
  rssm_state_export_args out{};
  out.struct_size = sizeof(out);
  out.abi_version = RSSM_ABI_VERSION;
  out.kind = shape.kind;
  out.window = kWindow;
  out.origin = pool.same(slots, 3);
  out.h = pool.same(slots, kWindow);
  out.a = pool.real({h}, -16.0f, -1.0f);
  out.checkpoint = pool.real({slots, h, p, n});
  out.ring_value = gdn ? pool.half({slots, h, kRing, p}) : pool.act({slots, h, kRing, p});
  out.ring_k = pool.act({slots, g, kRing, n});
  out.ring_dt = gdn ? pool.real({slots, h, kRing}, -0.2f, -0.001f) : pool.real({slots, h, kRing}, 0.001f, 0.1f);
  if (gdn) out.ring_key_factor = pool.real({slots, g, kRing}, 0.1f, 0.2f);
  std::vector<rssm_tensor> slot, states;
  for (int r = 0; r < rotations; ++r) {
    slot.push_back(pool.counting(rows, static_cast<int32_t>(r * rows)));
    states.push_back(pool.real({rows, h, p, n}));
  }
  rssm_state_import_args in{};
  in.struct_size = sizeof(in);
  in.abi_version = RSSM_ABI_VERSION;
  in.checkpoint = out.checkpoint;
  rssm_clear_state_args clear{};
  clear.struct_size = sizeof(clear);
  clear.abi_version = RSSM_ABI_VERSION;
  clear.checkpoint = out.checkpoint;
  rssm_error error{};
  report("state_export", shape.name, rows, 0, false, rows * (2 * state + kWindow * record), rotations, [&](int i) {
    out.slot = slot[static_cast<size_t>(i)];
    out.state = states[static_cast<size_t>(i)];
    ok(rssm_state_export(&out, report.stream, &error), error);
  });
  report("state_import", shape.name, rows, 0, false, rows * 2 * state, rotations, [&](int i) {
    in.slot = slot[static_cast<size_t>(i)];
    in.state = states[static_cast<size_t>(i)];
    ok(rssm_state_import(&in, report.stream, &error), error);
  });
  report("clear_state", shape.name, rows, 0, false, rows * state, rotations, [&](int i) {
    clear.slot = slot[static_cast<size_t>(i)];
    ok(rssm_clear_state(&clear, report.stream, &error), error);
  });
}

// Cursors of all rows: the one launch a step pays for all layers.
void benchCommit(const Reporter& report, int64_t rows) {
  Pool pool;
  rssm_commit_args a{};
  a.struct_size = sizeof(a);
  a.abi_version = RSSM_ABI_VERSION;
  a.window = 16;
  a.ring_rows = 17;
  a.slot = pool.counting(rows);
  a.num_tokens = a.accepted = pool.same(rows, 1);
  a.origin = pool.same(rows, 0);
  a.h = pool.same(rows, 0);
  a.position = pool.same(rows, 0);
  report("commit", "any", rows, 1, false, 36.0 * rows, 64, [&](int) {
    rssm_error error{};
    ok(rssm_commit(&a, report.stream, &error), error);
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::vector<int64_t> batches;
    for (const char* at = argc > 1 ? argv[1] : "1,8,256"; *at != '\0';) {
      char* end = nullptr;
      batches.push_back(std::strtol(at, &end, 10));
      at = *end == ',' ? end + 1 : end;
    }
    const char* only = argc > 2 ? argv[2] : "";
    cudaDeviceProp properties;
    cudaOk(cudaGetDeviceProperties(&properties, 0), "device");
    Reporter report{nullptr, 0, properties.name};
    cudaOk(cudaStreamCreateWithFlags(&report.stream, cudaStreamNonBlocking), "stream");
    report.bandwidth = copyBandwidth(report.stream);
    for (int64_t rows : batches) benchCommit(report, rows);
    for (const Shape& shape : case_list::kShapes) {
      if (*only != '\0' && std::strcmp(only, shape.name) != 0) continue;
      for (int64_t rows : batches) {
        for (int64_t tokens : {1, 4}) {
          benchInputs(report, shape, rows, tokens, false);
          benchNorm(report, shape, rows, tokens);
        }
      }
      benchInputs(report, shape, 8, 2048, true);
      benchNorm(report, shape, 8, 2048);
      benchStates(report, shape, 8);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "replayssm_ops_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
