// Times the list's float32 cases over the C ABI on full windows, cold L2, after a correctness gate; prints JSON lines.
//   replayssm_bench [--list] [--suite NAMES] [--operation NAMES] [--shape NAMES] [--rows NUMBERS] [--tokens NUMBERS]
//                   [--settled] [--traffic] [--gate]
// --list prints the cases with the bytes they must move and needs no GPU. --settled times launches that promise settled
// states, too. --traffic times beside each update what its memory traffic alone takes (traffic.h). --gate checks and times
// nothing; compute-sanitizer can go through the list so.
#include <cstring>
#include <map>
#include <memory>

#include "bench/gate.h"
#include "bench/problem.h"
#include "bench/support.h"
#include "bench/traffic_problem.h"

namespace {

struct Options {
  bool list = false, settled = false, traffic = false, gateOnly = false;
  std::string suite, operation, shape, rows, tokens;  // comma separated; empty: all
};

bool among(const std::string& names, const std::string& name) {
  return names.empty() || ("," + names + ",").find("," + name + ",") != std::string::npos;
}

Options parse(int argc, char** argv) {
  Options options;
  std::map<std::string, std::string*> named{{"--suite", &options.suite},
                                            {"--operation", &options.operation},
                                            {"--shape", &options.shape},
                                            {"--rows", &options.rows},
                                            {"--tokens", &options.tokens}};
  for (int i = 1; i < argc; ++i) {
    std::string name = argv[i];
    if (name == "--list") {
      options.list = true;
    } else if (name == "--settled") {
      options.settled = true;
    } else if (name == "--traffic") {
      options.traffic = true;
    } else if (name == "--gate") {
      options.gateOnly = true;
    } else if (named.count(name) != 0 && i + 1 < argc) {
      *named[name] = argv[++i];
    } else {
      throw std::runtime_error("expected --list, --settled, --traffic, --gate, or --suite, --operation, --shape, --rows "
                               "or --tokens and a value, got " + name);
    }
  }
  return options;
}

struct Machine {
  std::string gpu;
  double bandwidth;  // bytes per second, copy
};

// What is known of a case beside its own times; 0 or empty: nothing.
struct Beside {
  double conventional = 0;  // standard step, us
  double traffic = 0;       // us
  std::string trafficLaunch;
};

void report(const Shape& shape, const Case& c, const Machine& machine, int accepted,
            const std::map<int, Timing>& times, uint32_t flags, const Beside& beside) {
  double mean = 0, bytes = 0, low = 0, high = 0;
  std::vector<int> cycle = windowCycle(c, accepted);
  std::string steps;
  for (int h : cycle) {
    const Timing& t = times.at(h);
    mean += t.median / cycle.size();
    low += t.low / cycle.size();
    high += t.high / cycle.size();
    bytes += static_cast<double>(floorBytes(shape, c, h)) / cycle.size();
    char text[48];
    std::snprintf(text, sizeof(text), "%s\"%d\": %.2f", steps.empty() ? "" : ", ", h, t.median);
    steps += text;
  }
  const double floor = bytes / machine.bandwidth * 1e6;
  std::printf("{\"what\": \"%s\", \"shape\": \"%s\", \"B\": %d, \"T\": %d, \"L\": %d, \"accepted\": %d, "
              "\"programmatic\": %s, \"settled\": %s, \"us\": %.3f, \"us_quartiles\": [%.3f, %.3f], \"GBs\": %.1f, \"floor_us\": %.2f, "
              "\"percent_of_floor\": %.1f, ",
              operationName(c.operation), shape.name, c.rows, c.tokens, c.window, accepted,
              flags != Problem::kPlainLaunch ? "true" : "false", flags == Problem::kSettled ? "true" : "false", mean, low, high, bytes / mean * 1e-3, floor, 100 * floor / mean);
  if (beside.conventional > 0) std::printf("\"over_conventional\": %.3f, ", mean / beside.conventional);
  if (beside.traffic > 0) {
    std::printf("\"traffic_us\": %.3f, \"percent_of_traffic\": %.1f, \"traffic_launch\": \"%s\", ", beside.traffic,
                100 * beside.traffic / mean, beside.trafficLaunch.c_str());
  }
  std::printf("\"by_h\": {%s}, \"copy_TBs\": %.3f, \"gpu\": \"%s\"}\n", steps.c_str(), machine.bandwidth * 1e-12,
              machine.gpu.c_str());
  std::fflush(stdout);
}

// Times one case; `standard` collects the conventional standard steps by batch.
void run(const Shape& shape, const Case& c, const Machine& machine, std::map<int, double>& standard,
         const Options& options, cudaStream_t stream) {
  Problem problem(shape, c, c.rows);
  const bool update = c.operation == Operation::kUpdate;
  std::map<int, Beside> beside{{c.tokens, {}}};  // by tokens accepted
  if (update) beside[1];
  if (options.traffic && update) {
    TrafficProblem traffic(problem);
    for (auto& [accepted, own] : beside) own.traffic = traffic.time(windowCycle(c, accepted), stream, &own.trafficLaunch);
  }
  for (uint32_t flags : {Problem::kPlainLaunch, Problem::kProgrammatic, Problem::kSettled}) {
    if (flags == Problem::kProgrammatic && c.rows > 8) continue;
    if (flags == Problem::kSettled && !options.settled) continue;
    std::map<int, Timing> times;
    for (const auto& [accepted, own] : beside) {
      for (int h : windowCycle(c, accepted)) times[h] = {};
    }
    std::vector<std::function<void()>> cases;
    for (const auto& entry : times) {
      cases.push_back([&problem, h = entry.first, flags, stream] {
        for (int i = 0; i < problem.launches(); ++i) problem.run(i % problem.rotations, h, flags, stream);
      });
    }
    std::vector<Timing> measured = timeCases(stream, problem.launches(), cases);
    size_t index = 0;
    for (auto& entry : times) entry.second = measured[index++];
    if (c.operation == Operation::kConventional && c.tokens == 1) {
      double& best = standard[c.rows];
      best = best == 0 ? times.at(0).median : std::min(best, times.at(0).median);
    }
    for (auto own = beside.rbegin(); own != beside.rend(); ++own) {  // all accepted first
      own->second.conventional = standard[c.rows];
      report(shape, c, machine, own->first, times, flags, own->second);
    }
  }
}

// Gate once per kernel, then all batches; conventional cases first, as others are compared with them.
bool runShape(const Shape& shape, const std::vector<Case>& cases, const Machine& machine, const Options& options,
              cudaStream_t stream) {
  std::map<std::string, bool> gates;
  std::map<int, double> standard;
  bool green = true;
  for (Operation operation : {Operation::kConventional, Operation::kUpdate}) {
    for (const Case& c : cases) {
      if (c.operation != operation) continue;
      Case kind = c;
      kind.rows = 0;
      std::string name = caseName(shape, kind);
      const uint32_t flags = options.settled ? Problem::kSettled : Problem::kPlainLaunch;
      if (gates.count(name) == 0) green &= gates[name] = gate(shape, c, flags, stream);
      if (gates[name] && !options.gateOnly) run(shape, c, machine, standard, options, stream);
    }
  }
  return green;
}

void list(const Shape& shape, const Case& c) {
  std::map<int, int64_t> floors;
  for (int accepted : {1, c.tokens}) {
    for (int h : windowCycle(c, accepted)) floors[h] = floorBytes(shape, c, h);
  }
  std::string text;
  for (const auto& entry : floors) {
    text += (text.empty() ? "\"" : ", \"") + std::to_string(entry.first) + "\": " + std::to_string(entry.second);
  }
  std::printf("{\"case\": \"%s\", \"floor_bytes\": {%s}}\n", caseName(shape, c).c_str(), text.c_str());
}

int runAll(const Options& options) {
  cudaStream_t stream = nullptr;
  Machine machine;
  bool green = true;
  for (const Shape& shape : case_list::kShapes) {
    if (!among(options.shape, shape.name)) continue;
    std::vector<Case> cases;
    for (const Case& c : case_list::kCases) {
      if (!among(options.suite, c.suite) || !among(options.operation, operationName(c.operation)) ||
          !among(options.rows, std::to_string(c.rows)) ||
          !among(options.tokens, std::to_string(c.tokens))) {
        continue;
      }
      if (options.list) {
        list(shape, c);
      } else if (c.operation != Operation::kPrefill && c.recurrence == Format::kFloat32 && c.read == Format::kNone) {
        cases.push_back(c);
      }
    }
    if (cases.empty()) continue;
    if (stream == nullptr) {
      cudaDeviceProp properties;
      cudaOk(cudaGetDeviceProperties(&properties, 0), "device");
      cudaOk(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
      machine = {properties.name, options.gateOnly ? 0 : copyBandwidth(stream)};
    }
    green &= runShape(shape, cases, machine, options, stream);
  }
  return green ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return runAll(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "replayssm_bench: %s\n", error.what());
    return 1;
  }
}
