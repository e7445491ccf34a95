"""A driver, a native library and a compute-sanitizer for machines without a GPU, where device memory is the host's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from trtllm_replayssm.ops import _abi

_DRIVER = r"""
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned f) { return 0; }
int cuDeviceGet(int* d, int n) { return 0; }
int cuDevicePrimaryCtxRetain(void** c, int d) { return 0; }
int cuCtxSetCurrent(void* c) { return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuStreamCreate(void** s, unsigned f) { *s = malloc(1); return 0; }
int cuStreamIsCapturing(void* s, int* captures) { *captures = s == (void*)1; return 0; }
int cuMemAlloc_v2(unsigned long long* a, size_t n) {
  void* p = aligned_alloc(256, (n + 255) / 256 * 256);
  memset(p, 0xEE, n);
  *a = (unsigned long long)p;
  return p == 0;
}
int cuMemFree_v2(unsigned long long a) { free((void*)a); return 0; }
int cuMemcpyDtoH_v2(void* d, unsigned long long s, size_t n) { memcpy(d, (void*)s, n); return 0; }
int cuMemcpyHtoD_v2(unsigned long long d, const void* s, size_t n) { memcpy((void*)d, s, n); return 0; }
"""
_LIBRARY = r"""
#include "replayssm/elementwise.h"
#include "replayssm/draw.h"
#include <string.h>
uint32_t rssm_abi_version(void) { return VERSION; }
/* out = x weight, rows of D; a negative eps fails, 0 reads `out` as well */
rssm_status rssm_rms_norm(const rssm_rms_norm_args* a, void* stream, rssm_error* e) {
  if (a->eps < 0) { strcpy(e->message, "rms_norm: eps: expected 0, got less"); return 1; }
  for (int64_t r = 0; r < a->x.shape[0]; r++)
    for (int64_t d = 0; d < a->x.shape[1]; d++) {
      float* out = (float*)a->out.data + r * a->out.stride[0] + d;
      *out = ((float*)a->x.data)[r * a->x.stride[0] + d] * ((float*)a->weight.data)[d] + (a->eps == 0 ? *out : 0);
    }
  return 0;
}
rssm_status rssm_draw(const rssm_draw_args* a, void* w, size_t bytes, void* stream, rssm_error* e) {
  memset(a->tokens.data, (int)bytes, 8 * a->tokens.shape[0] * a->tokens.shape[1]);
  if (bytes > 0) memset(w, 7, bytes);
  return 0;
}
"""
_SANITIZER = """#!/bin/sh
[ "$1" = --version ] && echo "Version 2025.3.1.0 (build 1)" && exit 0
while [ "${1#*python}" = "$1" ]; do shift; done
"$@"
status=$?
echo "========= ERROR SUMMARY: 0 errors"
exit $status
"""


def make(folder: Path, include: Path) -> dict[str, str]:
    """Builds them below `folder` -> the environment that finds them. include: of the public headers."""
    folder.mkdir(parents=True, exist_ok=True)
    _compiled(folder / "libcuda.so.1", _DRIVER)
    _compiled(folder / "libreplayssm.so", _LIBRARY, f"-DVERSION={_abi.ABI_VERSION}", f"-I{include}")
    program = folder / "compute-sanitizer"
    program.write_text(_SANITIZER)
    program.chmod(0o755)
    return {
        "LD_LIBRARY_PATH": str(folder), "REPLAYSSM_NATIVE_LIBRARY": str(folder / "libreplayssm.so"),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }  # fmt: skip


def _compiled(path: Path, source: str, *options: str) -> None:
    command = ["cc", "-shared", "-fPIC", "-o", str(path), *options, "-x", "c", "-"]
    subprocess.run(command, input=source, text=True, check=True)
