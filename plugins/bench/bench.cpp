// Times the update over the C ABI on full windows, cold L2, after a correctness gate; prints JSON lines.
//   replayssm_bench [batch sizes, comma separated] [tokens, comma separated] [shape name]
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "bench/gate.h"
#include "bench/problem.h"
#include "bench/support.h"

namespace {

std::vector<int> numbers(const char* text) {
  std::vector<int> result;
  for (const char* at = text; *at != '\0';) {
    char* end = nullptr;
    result.push_back(static_cast<int>(std::strtol(at, &end, 10)));
    at = *end == ',' ? end + 1 : end;
  }
  return result;
}

// The committed records before each step of a steady window, when `accepted` of T tokens are kept each time.
std::vector<int> windowCycle(int window, int tokens, int accepted) {
  auto next = [&](int h) { return (h + tokens > window ? 0 : h) + accepted; };
  int start = 0;
  for (int i = 0; i < 4 * window; ++i) start = next(start);
  std::vector<int> cycle{start};
  for (int h = next(start); h != start; h = next(h)) cycle.push_back(h);
  return cycle;
}

void report(const Problem& problem, const char* device, double bandwidth, const char* what, int accepted,
            const std::map<int, Timing>& times, bool programmatic) {
  double mean = 0, floor = 0, low = 0, high = 0;
  std::vector<int> cycle = windowCycle(problem.window, problem.tokens, accepted);
  std::string steps;
  for (int h : cycle) {
    const Timing& t = times.at(h);
    mean += t.median / cycle.size();
    low += t.low / cycle.size();
    high += t.high / cycle.size();
    floor += problem.floorBytes(h) / bandwidth * 1e6 / cycle.size();
    char text[48];
    std::snprintf(text, sizeof(text), "%s\"%d\": %.2f", steps.empty() ? "" : ", ", h, t.median);
    steps += text;
  }
  std::printf("{\"what\": \"%s\", \"shape\": \"%s\", \"B\": %d, \"T\": %d, \"L\": %d, \"accepted\": %d, "
              "\"programmatic\": %s, \"us\": %.3f, \"us_quartiles\": [%.3f, %.3f], \"floor_us\": %.2f, "
              "\"percent_of_floor\": %.1f, \"by_h\": {%s}, \"copy_TBs\": %.3f, \"gpu\": \"%s\"}\n",
              what, problem.shape.name, problem.rows, problem.tokens, problem.window, accepted,
              programmatic ? "true" : "false", mean, low, high, floor, 100 * floor / mean, steps.c_str(),
              bandwidth * 1e-12, device);
  std::fflush(stdout);
}

// Read, update, write every step: the same kernels with a window of one record, which folds on each step.
void benchConventional(const Shape& shape, int rows, cudaStream_t stream, const char* device, double bandwidth) {
  Problem problem(shape, rows, /*tokens=*/1, /*window=*/1);
  for (bool programmatic : {false, true}) {
    if (programmatic && rows > 8) continue;
    auto enqueue = [&problem, programmatic, stream] {
      for (int i = 0; i < problem.launches(); ++i) problem.update(i % problem.rotations, 1, programmatic, stream);
    };
    std::map<int, Timing> times{{1, timeCases(stream, problem.launches(), {enqueue})[0]}};
    report(problem, device, bandwidth, "conventional", 1, times, programmatic);
  }
}

void benchUpdate(const Shape& shape, int rows, int tokens, cudaStream_t stream, const char* device, double bandwidth) {
  Problem problem(shape, rows, tokens, /*window=*/16);
  for (bool programmatic : {false, true}) {
    if (programmatic && rows > 8) continue;
    std::map<int, Timing> times;
    for (int accepted : {tokens, 1}) {
      for (int h : windowCycle(problem.window, tokens, accepted)) times[h] = {};
    }
    std::vector<std::function<void()>> cases;
    for (const auto& entry : times) {
      cases.push_back([&problem, h = entry.first, programmatic, stream] {
        for (int i = 0; i < problem.launches(); ++i) {
          problem.update(i % problem.rotations, h, programmatic, stream);
        }
      });
    }
    std::vector<Timing> measured = timeCases(stream, problem.launches(), cases);
    size_t index = 0;
    for (auto& entry : times) entry.second = measured[index++];
    report(problem, device, bandwidth, "update", tokens, times, programmatic);
    if (tokens > 1) report(problem, device, bandwidth, "update", 1, times, programmatic);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::vector<int> batches = numbers(argc > 1 ? argv[1] : "1,8,32,128,256,512");
    std::vector<int> tokens = numbers(argc > 2 ? argv[2] : "1,2,4,6,8");
    const char* only = argc > 3 ? argv[3] : "";
    cudaDeviceProp properties;
    cudaOk(cudaGetDeviceProperties(&properties, 0), "device");
    cudaStream_t stream;
    cudaOk(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    double bandwidth = copyBandwidth(stream);
    for (const Shape& shape : kShapes) {
      if (*only != '\0' && std::strcmp(only, shape.name) != 0) continue;
      for (int rows : batches) benchConventional(shape, rows, stream, properties.name, bandwidth);
      for (int t : tokens) {
        gate(shape, t, stream);
        for (int rows : batches) benchUpdate(shape, rows, t, stream, properties.name, bandwidth);
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "replayssm_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
