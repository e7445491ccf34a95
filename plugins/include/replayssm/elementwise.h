/*
 * What surrounds the matrix products of a layer: RMSNorm with the residual sum before it, and activations with their
 * products. 16-bit tensors, float32 inside.
 */
#ifndef REPLAYSSM_ELEMENTWISE_H
#define REPLAYSSM_ELEMENTWISE_H

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launch with programmatic stream serialisation; waits on the device before it reads anything but weight. */
enum { RSSM_ELEMENTWISE_PROGRAMMATIC_LAUNCH = 1 };

/*
 * out = s / sqrt(mean(s^2) + eps) (weight_offset + weight) over each row, where s is x, or x + residual rounded to act.
 * x may be what a matrix product left in parts, each the sum over a share of its inputs: they are added up in their order.
 */
typedef struct rssm_rms_norm_args {
  uint32_t struct_size; /* sizeof(rssm_rms_norm_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* RSSM_ELEMENTWISE_* */
  float eps;            /* >= 0 */
  float weight_offset;  /* 0, or 1 where weights are stored less one; added in float32 */
  int32_t reserved;     /* 0 */

  rssm_tensor x;        /* [R, D] bfloat16 | float16 (act), channels contiguous; with a residual also [parts, R, D] float32 */
  rssm_tensor residual; /* [R, D] act, channels contiguous; nullable: nothing is added */
  rssm_tensor weight;   /* [D] float32, contiguous */
  rssm_tensor sum;      /* [R, D] act, channels contiguous, written; null iff residual is; may be residual or an x of act */
  rssm_tensor out;      /* [R, D] act, channels contiguous, written; may be an x of act where sum is not */
} rssm_rms_norm_args;

RSSM_API rssm_status rssm_rms_norm(const rssm_rms_norm_args* args, void* stream, rssm_error* error);

enum {
  RSSM_SILU = 1,    /* out = SiLU(x) factor sigmoid(opening) */
  RSSM_SIGMOID = 2, /* out = sigmoid(x) factor sigmoid(opening) */
  RSSM_RELU2 = 3    /* out = max(x, 0)^2 factor sigmoid(opening) */
};

typedef struct rssm_activation_args {
  uint32_t struct_size; /* sizeof(rssm_activation_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* RSSM_ELEMENTWISE_* */
  int32_t function;     /* RSSM_SILU ... */

  rssm_tensor x;       /* [R, G, D] act, channels contiguous: may be a slice of a projection */
  rssm_tensor factor;  /* [R, G, D] act, channels contiguous; nullable: 1 */
  rssm_tensor opening; /* [R] float32, one of a row: may be a column of a projection; nullable: no sigmoid of it */
  rssm_tensor out;     /* [R, G, D] act, channels contiguous, written; may be x or factor */
} rssm_activation_args;

RSSM_API rssm_status rssm_activation(const rssm_activation_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
