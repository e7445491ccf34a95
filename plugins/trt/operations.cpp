#include "trt/operations.h"

namespace replayssm::trt {

std::vector<UpdatePort> Mamba2Replay::ports(const Config& config) {
  std::vector<UpdatePort> ports = cursorPorts();
  ports.insert(ports.end(), {{"value", &Args::value, config.act(), 4, false},
                             {"k", &Args::k, config.act(), 4, false},
                             {"q", &Args::q, config.act(), 4, false},
                             {"dt", &Args::dt, RSSM_FLOAT32, 3, false},
                             {"a", &Args::a, RSSM_FLOAT32, 1, false},
                             {"skip", &Args::skip, RSSM_FLOAT32, 1, false}});
  appendCheckpoints(config, ports);
  ports.insert(ports.end(), {{"ring_value", &Args::ring_value, config.act(), 4, true},
                             {"ring_k", &Args::ring_k, config.act(), 4, true},
                             {"ring_dt", &Args::ring_dt, RSSM_FLOAT32, 3, true}});
  return ports;
}

std::vector<UpdatePort> GatedDeltaNetReplay::ports(const Config& config) {
  std::vector<UpdatePort> ports = cursorPorts();
  ports.insert(ports.end(), {{"value", &Args::value, config.act(), 4, false},
                             {"k", &Args::k, config.act(), 4, false},
                             {"q", &Args::q, config.act(), 4, false},
                             {"log_decay", &Args::log_decay, RSSM_FLOAT32, 3, false},
                             {"beta", &Args::beta, RSSM_FLOAT32, 3, false}});
  appendCheckpoints(config, ports);
  ports.insert(ports.end(), {{"ring_value", &Args::ring_value, RSSM_FLOAT16, 4, true},
                             {"ring_k", &Args::ring_k, config.act(), 4, true},
                             {"ring_dt", &Args::ring_dt, RSSM_FLOAT32, 3, true},
                             {"ring_key_factor", &Args::ring_key_factor, RSSM_FLOAT32, 3, true}});
  if (config.rederives()) {
    ports.push_back({"ring_v", &Args::ring_v, config.act(), 4, true});
    ports.push_back({"ring_beta", &Args::ring_beta, RSSM_FLOAT32, 3, true});
  }
  return ports;
}

std::vector<Port<rssm_commit_args>> ReplayCommit::ports(const Config&) {
  return {{"after", nullptr, RSSM_NO_DTYPE, -1, false},
          {"slot", &Args::slot, RSSM_INT32, 1, false},
          {"num_tokens", &Args::num_tokens, RSSM_INT32, 1, false},
          {"accepted", &Args::accepted, RSSM_INT32, 1, false},
          {"origin", &Args::origin, RSSM_INT32, 1, true},
          {"h", &Args::h, RSSM_INT32, 1, true},
          {"position", &Args::position, RSSM_INT32, 1, true}};
}

}  // namespace replayssm::trt
