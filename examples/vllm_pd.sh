#!/usr/bin/env bash
# Two vLLM servers and kvferry's router: one server computes prompts, the other writes answers.
#
#   examples/vllm_pd.sh MODEL [PORT]
#
# PYTHON names a Python that has vLLM and kvferry (python3 by default). Both servers are given VLLM_ARGS, for instance
# VLLM_ARGS="--enforce-eager --max-model-len 2048". Ctrl-C ends all three.
set -euo pipefail

model=${1:?"usage: examples/vllm_pd.sh MODEL [PORT]"}
port=${2:-8000}
prefill=$((port + 1))
decode=$((port + 2))
python=${PYTHON:-python3}

trap 'trap - EXIT; kill $(jobs -p) 2>/dev/null || true; wait' EXIT

serve() { # ROLE PORT
  # shellcheck disable=SC2086  # VLLM_ARGS is several words
  "$python" -m vllm.entrypoints.openai.api_server --model "$model" --port "$2" ${VLLM_ARGS:-} --kv-transfer-config "{
    \"kv_connector\": \"KVFerryConnector\",
    \"kv_connector_module_path\": \"kvferry.engines.vllm.connector\",
    \"kv_role\": \"$1\"
  }" &
}

serve kv_producer "$prefill"
serve kv_consumer "$decode"
for server in "$prefill" "$decode"; do
  until curl --silent --fail --output /dev/null "http://127.0.0.1:$server/health"; do
    [ "$(jobs -pr | wc -l)" -eq 2 ] || { echo "a vLLM server has ended; its log is above" >&2; exit 1; }
    sleep 1
  done
done

echo "ready: curl http://127.0.0.1:$port/v1/completions -d '{\"prompt\": \"Why is the sky blue?\", \"max_tokens\": 40}'"
"$python" -m kvferry route --port "$port" --prefill "http://127.0.0.1:$prefill" --decode "http://127.0.0.1:$decode"
