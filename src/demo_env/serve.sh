#!/usr/bin/env bash
# A real vLLM on CPU in the foreground: SmolLM2-135M with an EAGLE-3 head that can be swapped, and the tap.
#   serve.sh [extra vllm arguments]
# From the environment:
#   DRAFTSMITH_ENV       directory made by setup.sh (required)
#   DRAFTSMITH_PLUGIN    directory that holds draftsmith_vllm (required)
#   DRAFTSMITH_HEAD      head to start with: config.json and model.safetensors (required)
#   DRAFTSMITH_TRANSFER  directory for the states of finished requests (required)
#   PORT 8100, K 3, DTYPE float32, MAX_MODEL_LEN 2048, MAX_NUM_SEQS 16, OMP_NUM_THREADS 1
# float32: greedy answers are then the same with and without speculation; in bfloat16 near ties may flip.
set -euo pipefail
: "${DRAFTSMITH_ENV:?the directory made by setup.sh}" "${DRAFTSMITH_PLUGIN:?the directory of the plugin}"
: "${DRAFTSMITH_HEAD:?the head to start with}" "${DRAFTSMITH_TRANSFER:?the directory for states}"
mkdir -p -m 700 "$DRAFTSMITH_TRANSFER"
# OpenMP threads that spin between regions starve the rest of a small machine: Intel's runtime, no spinning
export LD_PRELOAD="$DRAFTSMITH_ENV/venv/lib/libiomp5.so" KMP_BLOCKTIME=0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
  VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" VLLM_TARGET_DEVICE=cpu
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# the routes for weight updates and status exist in this mode alone; bind to loopback
export VLLM_SERVER_DEV_MODE=1 PYTHONPATH="$DRAFTSMITH_PLUGIN${PYTHONPATH:+:$PYTHONPATH}" PATH="$DRAFTSMITH_ENV/venv/bin:$PATH"
exec vllm serve "$DRAFTSMITH_ENV/smollm2-135m" --host 127.0.0.1 --port "${PORT:-8100}" --served-model-name smollm2 \
  --dtype "${DTYPE:-float32}" --max-model-len "${MAX_MODEL_LEN:-2048}" --max-num-seqs "${MAX_NUM_SEQS:-16}" --enforce-eager \
  --speculative-config "{\"method\":\"eagle3\",\"model\":\"$DRAFTSMITH_HEAD\",\"num_speculative_tokens\":${K:-3}}" \
  --weight-transfer-config '{"backend":"draftsmith"}' \
  --worker-extension-cls draftsmith_vllm.worker.DraftsmithWorker \
  --kv-transfer-config "{\"kv_connector\":\"DraftsmithConnector\",\"kv_role\":\"kv_producer\",\"kv_connector_extra_config\":{\"transfer_dir\":\"$DRAFTSMITH_TRANSFER\"}}" \
  "$@"
