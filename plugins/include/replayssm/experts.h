/*
 * Routed experts with packed weights, and one dense product over the same kernel. Few tokens, many weights: weights are
 * NVFP4, FP8 or bfloat16 and become bfloat16 on the fly (exactly), activations are bfloat16, sums are float32.
 *
 * rssm_experts, per token t with choices j:
 *   out[t] = sum_j weights[t, j] down_e(act(up_e x[t])), e = ids[t, j], in the order of j
 *   act: max(., 0)^2, or silu(gate) * up for gated experts, whose gate and up matrices are packed as one.
 * Rounded to bfloat16: act's result, each weighted answer, the sum. ids < 0 or >= E give no work; a token without any
 * choice gets zeros. Experts without tokens cost nothing. No host synchronisation: a captured launch serves any routing.
 */
#ifndef REPLAYSSM_EXPERTS_H
#define REPLAYSSM_EXPERTS_H

#include <stddef.h>

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The first launch with programmatic stream serialisation; it waits on the device before it reads activations. */
enum { RSSM_EXPERTS_PROGRAMMATIC_LAUNCH = 1 };

/* E matrices [rows, columns] in the order of kernels/experts/README.md: groups of 128 rows by blocks of 128 columns. */
typedef struct rssm_packed_weights {
  int32_t rows;             /* M: output channels, of one part; even where there is one */
  int32_t columns;          /* K, a multiple of 8 */
  int32_t parts;            /* 1; 2: gate and up, interleaved row by row */
  int32_t reserved;
  rssm_tensor data;         /* [E, groups, blocks, 16384] float4_e2m1 | float8_e4m3 | bfloat16, contiguous;
                               groups = ceil(M parts / 128), blocks = ceil(K / 128) */
  rssm_tensor block_scale;  /* float4_e2m1: [E, groups, blocks, 1024] float8_e4m3, contiguous; otherwise absent */
  rssm_tensor factor;       /* [E, parts, 1 or M] float32: multiplies the product's rows */
} rssm_packed_weights;

typedef struct rssm_experts_args {
  uint32_t struct_size; /* sizeof(rssm_experts_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* RSSM_EXPERTS_* */
  int32_t pass_tokens;  /* most tokens of an expert that share one reading of its weights: 16, 32, 64; 0: chosen */

  rssm_packed_weights up;   /* M = I, K = X; parts = 2: gated */
  rssm_packed_weights down; /* M = X, K = I, parts = 1 */
  rssm_tensor x;            /* [N, X] bfloat16, channels contiguous, rows whole 16 bytes */
  rssm_tensor ids;          /* [N, k] int32, choices contiguous; k <= 64 */
  rssm_tensor weights;      /* [N, k] float32, choices contiguous */
  rssm_tensor out;          /* [N, X] bfloat16, channels contiguous, rows whole 16 bytes, written */
} rssm_experts_args;

/* Device bytes of the workspace, 16-byte aligned, whose contents do not matter, before or after. */
RSSM_API rssm_status rssm_experts_workspace(const rssm_experts_args* args, size_t* bytes, rssm_error* error);
RSSM_API rssm_status rssm_experts(const rssm_experts_args* args, void* workspace, size_t workspace_bytes, void* stream,
                                  rssm_error* error);

/* out = x weight^T. */
typedef struct rssm_packed_linear_args {
  uint32_t struct_size; /* sizeof(rssm_packed_linear_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* RSSM_EXPERTS_* */
  int32_t pass_tokens;  /* as in rssm_experts_args */

  rssm_packed_weights weight; /* E = 1, parts = 1 */
  rssm_tensor x;              /* [N, K] bfloat16, channels contiguous, rows whole 16 bytes */
  rssm_tensor out;            /* [N, M] bfloat16, channels contiguous, rows whole 4 bytes, written */
} rssm_packed_linear_args;

RSSM_API rssm_status rssm_packed_linear(const rssm_packed_linear_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
