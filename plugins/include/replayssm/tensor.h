/*
 * A view of device memory: pointer, element type, shape and strides in ELEMENTS. Owns nothing.
 *
 * An absent (nullable) tensor is a view whose data is null and whose rank is 0.
 */
#ifndef REPLAYSSM_TENSOR_H
#define REPLAYSSM_TENSOR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RSSM_MAX_RANK 4

enum {
  RSSM_NO_DTYPE = 0,
  RSSM_FLOAT32 = 1,
  RSSM_FLOAT16 = 2,
  RSSM_BFLOAT16 = 3,
  RSSM_FLOAT8_E4M3 = 4, /* one byte per element */
  RSSM_FLOAT4_E2M1 = 5, /* two elements per byte, even index in the low nibble; shapes count elements */
  RSSM_INT32 = 6,
  RSSM_INT64 = 7
};

typedef struct rssm_tensor {
  void* data;                     /* device pointer */
  int32_t dtype;                  /* RSSM_FLOAT32 ... */
  int32_t rank;                   /* 0..RSSM_MAX_RANK */
  int64_t shape[RSSM_MAX_RANK];   /* outermost first; entries from `rank` on are ignored */
  int64_t stride[RSSM_MAX_RANK];  /* elements */
} rssm_tensor;

#ifdef __cplusplus
}
#endif
#endif
