// Times the prompt scan over the C ABI and prints JSON lines: microseconds, tokens a second, and the share of the copy
// bandwidth that its inputs, outputs and states would need. Correctness is the tests' business (tests/native).
// The cases are the list's prompts.
//   replayssm_prefill_bench [shape name]
#include <cstring>

#include "bench/cases.h"
#include "bench/ops_support.h"
#include "replayssm/prefill.h"

namespace {

// `rows` fresh sequences of `tokens` tokens; the inputs of one call are larger than the L2 for all but the smallest.
void bench(const Reporter& report, const Shape& shape, const Case& size) {
  const int64_t ringRows = size.window + 1;
  const bool gdn = shape.kind == RSSM_GDN;
  const int64_t b = size.rows, t = size.tokens, h = shape.heads, g = shape.groups, p = shape.headDim,
                n = shape.stateDim;
  Pool pool;
  rssm_prefill_args a{};
  a.struct_size = sizeof(a);
  a.abi_version = RSSM_ABI_VERSION;
  a.kind = shape.kind;
  a.window = size.window;
  a.slot = pool.counting(b);
  a.num_tokens = pool.same(b, static_cast<int32_t>(t));
  a.origin = pool.same(b, 0);
  a.h = pool.same(b, 0);
  a.value = pool.act({b, t, h, p});
  a.k = pool.act({b, t, g, n});
  a.q = pool.act({b, t, g, n});
  a.out = pool.act({b, t, h, p});
  if (gdn) {
    a.log_decay = pool.real({b, t, h}, -0.2f, -0.001f);
    a.beta = pool.real({b, t, h}, 0.1f, 0.9f);
    a.ring_key_factor = pool.real({b, g, ringRows}, 0.1f, 0.2f);
  } else {
    a.dt = pool.real({b, t, h}, 0.001f, 0.1f);
    a.a = pool.real({h}, -16.0f, -1.0f);
    a.skip = pool.real({h});
  }
  a.checkpoint = pool.real({b, h, p, n});
  a.ring_value = gdn ? pool.half({b, h, ringRows, p}) : pool.act({b, h, ringRows, p});
  a.ring_k = pool.act({b, g, ringRows, n});
  a.ring_dt = pool.real({b, h, ringRows}, -0.2f, -0.001f);
  rssm_error error{};
  size_t workspaceBytes = 0;
  ok(rssm_prefill_workspace(&a, &workspaceBytes, &error), error);
  Buffer workspace(static_cast<int64_t>(workspaceBytes) + 1);
  report("prefill", shape.name, b, t, false, static_cast<double>(floorBytes(shape, size, 0)), 8, [&](int) {
    ok(rssm_prefill(&a, workspace.data(), workspaceBytes, report.stream, &error), error);
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const char* only = argc > 1 ? argv[1] : "";
    cudaDeviceProp properties;
    cudaOk(cudaGetDeviceProperties(&properties, 0), "device");
    Reporter report{nullptr, 0, properties.name};
    cudaOk(cudaStreamCreateWithFlags(&report.stream, cudaStreamNonBlocking), "stream");
    report.bandwidth = copyBandwidth(report.stream);
    for (const Shape& shape : case_list::kShapes) {
      if (*only != '\0' && std::strcmp(only, shape.name) != 0) continue;
      for (const Case& size : case_list::kCases) {
        if (size.operation == Operation::kPrefill) bench(report, shape, size);
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "replayssm_prefill_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
