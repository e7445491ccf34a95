// The routed experts as the ABI layer sees them: plain data, checked there. Sizes of packed weights follow from the
// format's tile and live here, so that host and device agree.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace replayssm {

enum class WeightFormat { kNvfp4, kFp8, kBfloat16 };

// What happens to a product before it is stored.
enum class ExpertEpilogue {
  kPlain,        // times the row factor
  kRelu2,        // max(., 0)^2
  kSwiglu,       // silu(gate) * up, the rows of a fragment's halves
  kWeighted,     // times the routing weight of the token
};

constexpr int kTileRows = 16;         // rows of a packed tile: the matrix instruction's
constexpr int kMaxPassTokens = 64;    // tokens of one pass over an expert's weights
constexpr int kRowGroup = 8;          // rows of an expert are rounded up to, and cores of a warpgroup's tokens have
constexpr int kMaxExperts = 1024;
constexpr int kMaxChoices = 64;       // of a token
constexpr int kLayoutColumns = 128;   // K is padded to whole blocks of as many columns
constexpr int kLayoutTiles = 8;       // rows to whole groups of as many tiles

// One pass over the weights of one expert. `cost` sums up the passes before it.
struct ExpertEntry {
  int32_t expert, first, count, cost;  // rows first .. first + count of the sorted (token, choice) pairs; first: whole 8
};

// The plan of a step, on the device.
struct ExpertPlan {
  int32_t* entryCount;    // [1]
  int32_t* tickets;       // [2] counters of the pieces that blocks of either product have drawn
  ExpertEntry* entries;   // [most + 1], the last holds the whole cost
  int32_t* rowToken;      // [rows] token of a sorted pair; rows between experts are padding
  float* rowWeight;       // [rows] its routing weight
  int32_t* position;      // [pairs] place of a pair among the sorted, -1: none
};

// Whether the instructions of a warpgroup (sm_90a) are part of this build.
#if defined(RSSM_WARPGROUP)
constexpr bool kDeepBuilt = true;
#else
constexpr bool kDeepBuilt = false;
#endif

// Place of a column among its 64 in the order that the instructions of a warpgroup want: those of its 16 columns first.
__host__ __device__ constexpr int columnPlace(int column) {
  return (column & ~63) | (column >> 2 & 3) << 4 | (column >> 1 & 1) << 3 | (column >> 4 & 3) << 1 | (column & 1);
}

// Tokens with the columns of each 64 in the order of columnPlace (order.cuh), beside the plan.
struct OrderParams {
  const void* in;  // bfloat16 [tokens, columns]; null: nobody wants them
  void* out;       // bfloat16 [tokens, columns], contiguous
  int64_t inStride;
  int32_t tokens, columns;  // whole blocks of 64
};

struct PlanParams {
  const int32_t* ids;     // [tokens, topK]
  const float* weights;   // [tokens, topK]
  int64_t idStride, weightStride;
  int32_t tokens, topK, experts, passTokens;
  uint32_t topKInverse;   // 2^32 / topK, rounded up; of no use where topK is 1
  ExpertPlan plan;
  OrderParams order;
  bool programmaticLaunch;
};

// A stack of packed matrices and what it is multiplied with.
struct GroupedParams {
  WeightFormat format;
  ExpertEpilogue epilogue;
  const uint8_t* weights;      // [experts, groups of tiles, steps, tiles of a group, bytes]
  const uint8_t* blockScales;  // NVFP4: [experts, groups of tiles, steps, tiles of a group, 128]
  const float* factor;         // [experts, parts, 1 | rows]
  int64_t factorExpert, factorPart, factorRow;  // strides, elements
  int32_t tiles, columns;      // of 16 rows; K before padding
  int32_t outRows;             // channels that are stored

  const void* in;              // bfloat16 [., columns]
  int64_t inStride;
  void* out;                   // bfloat16 [., outRows]
  int64_t outStride;
  const ExpertEntry* entries;  // null: one matrix and `tokens` rows in order
  const int32_t* entryCount;
  const int32_t* rowToken;     // null: rows are in order
  const float* rowWeight;
  int32_t* tickets;            // deep: of this product
  int32_t tokens;
  int32_t passTokens;          // most tokens of a pass here
  int32_t steps, groups;       // of a round over K; of tiles of a pass: set by launchGrouped, as the next two
  int32_t stageBytes, stages;  // of the ring
  int32_t outStep;             // deep: columns of a step of the product that reads `out`, 0: rows as they are
  bool weightsFirst;           // the plan is there, or none is needed: weights may come before the predecessor ends
  bool programmaticLaunch;
};

struct ReduceParams {
  const void* rows;            // bfloat16 [pairs, channels], contiguous
  const int32_t* position;     // [tokens, topK]
  void* out;                   // bfloat16 [tokens, channels]
  int64_t outStride;
  int32_t tokens, topK, channels;
};

cudaError_t launchPlan(const PlanParams& p, cudaStream_t stream);
cudaError_t launchGrouped(const GroupedParams& p, cudaStream_t stream);
// Products by the instructions of a warpgroup (deep.cuh): only where kDeepBuilt, on compute capability 9.0.
cudaError_t launchDeep(const GroupedParams& p, cudaStream_t stream);
int stepColumnsOf(WeightFormat format);
cudaError_t launchReduce(const ReduceParams& p, cudaStream_t stream);

}  // namespace replayssm
