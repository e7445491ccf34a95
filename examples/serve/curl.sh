#!/usr/bin/env bash
# Every endpoint once, with curl alone. Usage: examples/serve/curl.sh [URL] [API_KEY]
set -euo pipefail
URL="${1:-http://127.0.0.1:8000}"
KEY="${2:-none}"

call() { # METHOD PATH [JSON]
  echo "== $1 $2"
  curl --silent --show-error --fail-with-body --no-buffer --max-time 120 \
    --request "$1" "$URL$2" --header "Authorization: Bearer $KEY" \
    ${3:+--header "Content-Type: application/json" --data "$3"}
  echo
}

call GET /health
call GET /openapi.json | cut -c 1-300
call GET / | sed -n 1,8p
call GET /status.json
call GET /version
call GET /v1/models
MODEL="$(call GET /v1/models | sed -n 's/.*"id":"\([^"]*\)".*/\1/p')"
call GET "/v1/models/$MODEL"
call POST /tokenize '{"prompt": "The history of the"}'
call POST /detokenize '{"tokens": [5, 6, 7]}'
call POST /v1/completions "{\"model\": \"$MODEL\", \"prompt\": \"The history of the\", \"max_tokens\": 16, \"temperature\": 0}"
call POST /v1/completions "{\"model\": \"$MODEL\", \"prompt\": \"1\", \"max_tokens\": 8, \"seed\": 1, \"stream\": true}"
call POST /v1/chat/completions "{\"model\": \"$MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 16}"
call POST /v1/responses "{\"model\": \"$MODEL\", \"input\": \"Hello\", \"max_output_tokens\": 16}"
call GET /health_generate
call GET /metrics
call GET /prometheus/metrics
call GET /perf_metrics
