/*
 * Status codes and the caller-owned error record of the native library.
 *
 * Every public function returns an rssm_status and, on failure, writes one sentence into the record the caller
 * passed (operation, argument, expected, got, hint). The library keeps no "last error", never throws and never exits.
 */
#ifndef REPLAYSSM_STATUS_H
#define REPLAYSSM_STATUS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised by one whenever an args struct, a constant or a function changes or is added; callers compare it with
   rssm_abi_version() before they call anything else. */
#define RSSM_ABI_VERSION 6u

#if defined(_WIN32)
#define RSSM_API __declspec(dllexport)
#else
#define RSSM_API __attribute__((visibility("default")))
#endif

typedef int32_t rssm_status;

enum {
  RSSM_OK = 0,
  RSSM_INVALID_ARGUMENT = 1,   /* shape, dtype, stride, null pointer or range; the caller's fault */
  RSSM_UNSUPPORTED = 2,        /* a legal request this library was not built for; the message lists what it was */
  RSSM_WORKSPACE_TOO_SMALL = 3,
  RSSM_ABI_MISMATCH = 4,       /* struct_size or abi_version is not this library's */
  RSSM_CUDA_ERROR = 5,         /* a launch or attribute call failed */
  RSSM_INTERNAL = 6            /* a bug in this library */
};

#define RSSM_ERROR_CHARS 508

/* Written on failure, untouched on success; may be null. */
typedef struct rssm_error {
  rssm_status status;
  char message[RSSM_ERROR_CHARS]; /* NUL-terminated, truncated when too long */
} rssm_error;

RSSM_API uint32_t rssm_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif
