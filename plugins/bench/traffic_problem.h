// A problem's traffic (traffic.h) at the best of several launches: what a step of its bytes takes at least.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "bench/problem.h"
#include "bench/traffic.h"

class TrafficProblem {
 public:
  explicit TrafficProblem(const Problem& problem) : problem_(problem) {
    const rssm_update_args& a = problem.args;
    const Shape& shape = problem.shape;
    base_.rows = problem.rows;
    base_.tokens = problem.tokens;
    base_.heads = shape.heads;
    base_.groups = shape.groups;
    base_.window = problem.window;
    base_.ringRows = problem.ringRows;
    base_.valueBytes = 2 * shape.headDim;
    base_.keyBytes = 2 * shape.stateDim;
    base_.stateBytes = 4 * shape.headDim * shape.stateDim;
    base_.state = static_cast<char*>(a.checkpoint.data);
    base_.ringValue = static_cast<char*>(a.ring_value.data);
    base_.ringKey = static_cast<char*>(a.ring_k.data);
    base_.ringNumber = static_cast<float*>(a.ring_dt.data);
    base_.value = static_cast<const char*>(a.value.data);
    base_.key = static_cast<const char*>(a.k.data);
    base_.query = static_cast<const char*>(a.q.data);
    base_.number = static_cast<const float*>(problem.gdn() ? a.log_decay.data : a.dt.data);
    base_.secondNumber = static_cast<const float*>(problem.gdn() ? a.beta.data : nullptr);
    base_.out = static_cast<char*>(a.out.data);
    for (int r = 0; r < problem.rotations; ++r) {
      std::vector<int32_t> rows;
      for (int32_t slot : problem.slotsOf(r)) rows.insert(rows.end(), {slot, problem.originOf(slot)});
      rows_.push_back(pool_.integers(rows).data);
      tickets_.push_back(pool_.same(2, 0).data);  // launches in turn overlap
    }
  }

  // Microseconds a step, mean over the cycle, of the launch that takes the least; its name.
  double time(const std::vector<int>& cycle, cudaStream_t stream, std::string* name) {
    constexpr int kTrialRounds = 8, kRounds = 24;
    const std::vector<int> ends{*std::min_element(cycle.begin(), cycle.end()), *std::max_element(cycle.begin(), cycle.end())};
    const std::vector<TrafficLaunch> tried = launches();
    const TrafficLaunch* best = nullptr;
    double least = 0;
    for (const TrafficLaunch& launch : tried) {
      const std::map<int, double> found = timed(launch, ends, kTrialRounds, stream);
      const double sum = found.at(ends[0]) * static_cast<double>(cycle.size() - 1) + found.at(ends[1]);  // one step flushes
      if (best == nullptr || sum < least) best = &launch, least = sum;
    }
    *name = std::to_string(best->workers) + " workers, runs of " + std::to_string(best->heads);
    double sum = 0;
    for (const auto& [h, us] : timed(*best, cycle, kRounds, stream)) sum += us;
    return sum / static_cast<double>(cycle.size());
  }

 private:
  // As many workers as have room, and runs that cut groups equally.
  std::vector<TrafficLaunch> launches() const {
    const int perGroup = problem_.shape.heads / problem_.shape.groups;
    std::vector<TrafficLaunch> found;
    for (int workers : {1, 2, 3}) {
      for (int heads = 1; heads < perGroup; heads *= 2) {
        if (trafficFits(base_, {workers, heads})) found.push_back({workers, heads});
      }
      if (trafficFits(base_, {workers, perGroup})) found.push_back({workers, perGroup});
    }
    if (found.empty()) throw std::runtime_error("traffic: no launch serves " + std::string(problem_.shape.name));
    return found;
  }

  std::map<int, double> timed(const TrafficLaunch& launch, const std::vector<int>& hs, int rounds, cudaStream_t stream) {
    std::vector<std::function<void()>> cases;
    for (int h : hs) {
      cases.push_back([this, h, &launch, stream] {
        for (int i = 0; i < problem_.launches(); ++i) run(i % problem_.rotations, h, launch, stream);
      });
    }
    const std::vector<Timing> measured = timeCases(stream, problem_.launches(), cases, rounds);
    std::map<int, double> found;
    for (size_t i = 0; i < hs.size(); ++i) found[hs[i]] = measured[i].median;
    return found;
  }

  void run(int rotation, int h, const TrafficLaunch& launch, cudaStream_t stream) {
    Traffic traffic = base_;
    traffic.pending = h;
    traffic.row = static_cast<const TrafficRow*>(rows_[static_cast<size_t>(rotation)]);
    traffic.tickets = static_cast<unsigned*>(tickets_[static_cast<size_t>(rotation)]);
    cudaOk(launchTraffic(traffic, launch, stream), "traffic");
  }

  const Problem& problem_;
  Pool pool_;
  Traffic base_{};
  std::vector<void*> rows_, tickets_;
};
