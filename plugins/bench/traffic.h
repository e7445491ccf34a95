// The memory traffic of an update over float32 states without its arithmetic: how long a launch takes that only moves what
// an update must, from and to the same places (but for GDN's key factors, 4 bytes a record and group). Nothing waits for
// the launch before. Outputs and records are not those of the inputs; states stay as they are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// A row's slot and where its ring begins.
struct TrafficRow {
  int32_t slot, origin;
};

// How the bytes are moved: workers (a warp each) of a multiprocessor, and heads in turn that a worker takes at a time.
struct TrafficLaunch {
  int workers, heads;
};

struct Traffic {
  int rows, tokens, heads, groups, pending, window, ringRows;
  int valueBytes, keyBytes, stateBytes;                // of a head's token, a group's token, a head
  const TrafficRow* row;                               // [B]
  char *state, *ringValue, *ringKey;                   // [S, H, P, N], [S, H, C, P], [S, G, C, N]
  float* ringNumber;                                   // [S, H, C]
  const char *value, *key, *query;                     // [B, T, H, P], [B, T, G, N]
  const float *number, *secondNumber;                  // [B, T, H]; the second may be null
  char* out;                                           // [B, T, H, P]
  unsigned* tickets;                                   // [2], zero between launches
};

// Whether there is such a launch here: workers have room for two heads, runs cut groups equally, and neither the window nor
// the tokens are more than 32.
bool trafficFits(const Traffic& traffic, const TrafficLaunch& launch);

cudaError_t launchTraffic(const Traffic& traffic, const TrafficLaunch& launch, cudaStream_t stream);
