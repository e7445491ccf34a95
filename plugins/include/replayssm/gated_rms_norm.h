/*
 * RMSNorm over contiguous groups of the channels with a SiLU gate; sums and products in float32.
 *
 * gate_first (Mamba-2): out = norm(x SiLU(gate)) weight, one weight a channel.
 * otherwise (GDN):      out = norm(x) weight SiLU(gate), one weight a channel of a group, shared by the groups.
 * norm(y) = y / sqrt(mean(y^2) + eps) over each group.
 */
#ifndef REPLAYSSM_GATED_RMS_NORM_H
#define REPLAYSSM_GATED_RMS_NORM_H

#include "replayssm/status.h"
#include "replayssm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Launch with programmatic stream serialisation; waits on the device before it reads anything but weight. */
enum { RSSM_NORM_PROGRAMMATIC_LAUNCH = 1 };

typedef struct rssm_gated_rms_norm_args {
  uint32_t struct_size; /* sizeof(rssm_gated_rms_norm_args) */
  uint32_t abi_version; /* RSSM_ABI_VERSION */
  uint32_t flags;       /* RSSM_NORM_* */
  int32_t groups;       /* divides D */
  int32_t gate_first;   /* 0 or 1 */
  float eps;            /* >= 0 */

  rssm_tensor x;      /* [B, T, D] bfloat16 | float16 (act), channels contiguous */
  rssm_tensor gate;   /* [B, T, D] act, channels contiguous: may be a slice of a projection */
  rssm_tensor weight; /* gate_first: [D], else [D / groups]; float32, contiguous */
  rssm_tensor out;    /* [B, T, D] act, channels contiguous, written; may be x */
} rssm_gated_rms_norm_args;

RSSM_API rssm_status rssm_gated_rms_norm(const rssm_gated_rms_norm_args* args, void* stream, rssm_error* error);

#ifdef __cplusplus
}
#endif
#endif
