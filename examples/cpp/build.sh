#!/usr/bin/env bash
# Compiles decode_step. TENSORRT_INCLUDE_DIR: folder of NvInferRuntime.h; CUDA_HOME: the CUDA toolkit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
: "${TENSORRT_INCLUDE_DIR:?set it to the folder that holds NvInferRuntime.h}"
exec g++ -std=c++17 -O2 -Wall -Wextra -Werror -isystem "$TENSORRT_INCLUDE_DIR" -isystem "$CUDA_HOME/include" \
  decode_step.cpp -o "${1:-decode_step}" -L "$CUDA_HOME/lib64" -lcudart_static -ldl -lrt -lpthread
