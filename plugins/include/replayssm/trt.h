/*
 * What the TensorRT plugin library (libtrtllm_replayssm_plugins.so) exports beside TensorRT's own entry points.
 *
 * Plugin methods cannot throw and TensorRT's logger has no stable ABI across its major versions, so every failure of a
 * plugin becomes one sentence in an error record, handed to the host's callback (standard error when there is none).
 */
#ifndef REPLAYSSM_TRT_H
#define REPLAYSSM_TRT_H

#include "replayssm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Called on the thread that failed; the record is valid during the call. May run on several threads at once. */
typedef void (*rssm_trt_log)(const rssm_error* error);

/* Replaces the callback of the whole process; null restores standard error. */
RSSM_API void rssm_trt_set_log(rssm_trt_log log);

#ifdef __cplusplus
}
#endif
#endif
