/*
 * All that an SSM layer needs between its input projection and rssm_update or rssm_prefill, in one launch: the
 * convolution of conv1d.h, and the decay inputs in float32.
 *
 * Mamba-2: dt_out = clamp(softplus(dt + dt_bias), dt_low, dt_high).
 * GDN: log_decay = -exp(a_log) softplus(a + dt_bias), beta_out = sigmoid(beta).
 *
 * The update takes its inputs as views of conv.out: x | k | q (Mamba-2) or q | k | v (GDN) along the channels.
 * Tokens beyond num_tokens and padding rows are not read; their outputs are zero.
 */
#ifndef REPLAYSSM_SSM_INPUTS_H
#define REPLAYSSM_SSM_INPUTS_H

#include "replayssm/conv1d.h"
#include "replayssm/update.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rssm_ssm_inputs_args {
  uint32_t struct_size; /* sizeof(rssm_ssm_inputs_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  int32_t kind;         /* RSSM_MAMBA2 or RSSM_GDN */
  float dt_low;         /* Mamba-2: time_step_limit, 0 when the model has none */
  float dt_high;        /* Mamba-2: time_step_limit, infinity when the model has none */
  int32_t reserved;     /* 0 */

  rssm_conv1d_args conv; /* with its own header; letters and rows as there */

  rssm_tensor decay_in; /* [B, T, H] act, heads contiguous; Mamba-2 dt, GDN a */
  rssm_tensor beta_in;  /* [B, T, H] act, heads contiguous; GDN only: b */
  rssm_tensor dt_bias;  /* [H] float32, contiguous */
  rssm_tensor a_log;    /* [H] float32, contiguous; GDN only */
  rssm_tensor decay_out; /* [B, T, H] float32, contiguous, written; Mamba-2 dt, GDN log-decay */
  rssm_tensor beta_out;  /* [B, T, H] float32, contiguous, written; GDN only */
} rssm_ssm_inputs_args;

/* As rssm_conv1d_update: T 0..16. */
RSSM_API rssm_status rssm_ssm_inputs_update(const rssm_ssm_inputs_args* args, void* stream, rssm_error* error);

/* As rssm_conv1d_prefill: any T. */
RSSM_API rssm_status rssm_ssm_inputs_prefill(const rssm_ssm_inputs_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
