/*
 * SiLU of the depthwise causal convolution over a window that rolls back, for one layer.
 *
 * The window is a ring of pre-activation inputs: token at absolute position p lives in row p mod R, so rollback is
 * nothing but a smaller position. Taps before position 0 count as zero and are not read. `position` is only read:
 * rssm_commit or rssm_prefill_commit moves it, once for all layers.
 *
 * Letters: B rows, T tokens, S slots, D channels, K taps, R ring rows. Rows with slot -1 or num_tokens 0 read and write
 * nothing but a zero output. A token's bits do not depend on how the tokens are split into calls.
 */
#ifndef REPLAYSSM_CONV1D_H
#define REPLAYSSM_CONV1D_H

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Launch with programmatic stream serialisation: the kernel starts while its predecessor on the stream drains, and
 * waits for it on the device before it reads anything but weight and bias.
 */
enum { RSSM_CONV1D_PROGRAMMATIC_LAUNCH = 1 };

typedef struct rssm_conv1d_args {
  uint32_t struct_size; /* sizeof(rssm_conv1d_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* RSSM_CONV1D_* */
  int32_t reserved;     /* 0 */

  rssm_tensor slot;       /* [B] int32, any stride; -1 = padding */
  rssm_tensor num_tokens; /* [B] int32, any stride; 0..T, clamped */
  rssm_tensor position;   /* [S] int32, contiguous; committed tokens, the position of a row's first token */
  rssm_tensor x;          /* [B, T, D] bfloat16 | float16 (act), channels contiguous: may be a slice of a projection */
  rssm_tensor weight;     /* [D, K] float32, contiguous, K 2..8; the last tap multiplies the token itself */
  rssm_tensor bias;       /* [D] float32, contiguous; nullable */
  rssm_tensor window;     /* [S, R, D] act, contiguous but for the slot axis; the newest min(num_tokens, R) written */
  rssm_tensor out;        /* [B, T, D] act, channels contiguous, written; tokens from num_tokens on are zero */
} rssm_conv1d_args;

/* A decode or verify step: T 0..16 and R >= K - 1 + T, so that rejected tokens never overwrite a tap still needed. */
RSSM_API rssm_status rssm_conv1d_update(const rssm_conv1d_args* args, void* stream, rssm_error* error);

/* A chunk of a prompt, T of any length and R >= K - 1; continues from the window, so a chunk may have any size. */
RSSM_API rssm_status rssm_conv1d_prefill(const rssm_conv1d_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
