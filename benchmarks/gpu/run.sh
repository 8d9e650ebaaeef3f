#!/usr/bin/env bash
# All measurements of this folder, on a GPU host with vLLM 0.33 and what pack.sh packed on PYTHONPATH.
#
#   usage: run.sh OUT [PART ...]      parts: doctor kernels store fs drafts chunks invariance oracle pair; default: all, the
#                                     most wanted first. Logs and JSON go to OUT.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "$1"); shift
parts=${*:-doctor kernels store fs drafts chunks invariance oracle pair}
work=${WORK:-/tmp/deepinfer-gpu}
mkdir -p "$out" "$work/states"
begin=$(date +%s)
said() { echo "[$(($(date +%s) - begin)) s] $*"; }
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/card.txt"
[ -e "$work/wide/config.json" ] || python3 "$here/wide.py" "$work/wide"

states() { # NAME COMMAND...
    local name=$1; shift
    timeout 480 env "$@" > "$out/$name.log" 2>&1
    said "$name: exit code $?; $(grep -E '^[0-9]+ tokens:' "$out/$name.log" | tail -1)"
}

shown() { # NAME PATTERN COMMAND...
    local name=$1 pattern=$2; shift 2
    timeout 300 "$@" > "$out/$name.log" 2>&1
    said "$name: exit code $?"; grep -E "$pattern" "$out/$name.log"
}

for part in $parts; do case $part in
    doctor) python3 -m deepinfer_vllm.cli.main doctor > "$out/doctor.txt" 2>&1; said "doctor: exit code $?" ;;
    kernels)
        shown kernels '^\|' python3 "$here/kernels.py" --out "$out/kernels.json"
        for heads in 16 64; do
            shown kernels-graph-$heads '^\|' python3 "$here/kernels.py" --graph --block-heads $heads \
                --out "$out/kernels-graph-$heads.json"
        done ;;
    oracle)
        states upstream DEEPINFER_VLLM_MODEL=upstream python3 "$here/states.py" "$work/wide" "$work/states/upstream.safetensors" &
        states plain DEEPINFER_VLLM_MODEL=portable python3 "$here/states.py" "$work/wide" "$work/states/plain.safetensors" &
        states f64 python3 "$here/reference_states.py" "$work/wide" "$work/states/f64.safetensors" &
        wait
        states triton DEEPINFER_VLLM_MODEL=portable DEEPINFER_VLLM_KERNELS=triton \
            python3 "$here/states.py" "$work/wide" "$work/states/triton.safetensors" &
        states qat DEEPINFER_VLLM_MODEL=portable DEEPINFER_VLLM_NUMERICS=qat \
            python3 "$here/states.py" "$work/wide" "$work/states/qat.safetensors" &
        states f64-qat python3 "$here/reference_states.py" "$work/wide" "$work/states/f64-qat.safetensors" --qat &
        wait
        python3 "$here/compare.py" "$work/states" plain:upstream qat:upstream plain:f64 qat:f64-qat upstream:f64 \
            upstream:f64-qat plain:qat triton:plain triton:f64 --out "$out/oracle.json" ;;
    store)
        for step in bare fill load faulty; do
            shown "$step" "^$step:" python3 "$here/store.py" $step "$work/wide" "$work/kv" "$out"
        done
        python3 "$here/store_report.py" "$out" --out "$out/store.json" ;;
    fs)
        for step in fs-fill fs-load; do
            shown "$step" "^$step:" python3 "$here/store.py" $step "$work/wide" "$work/kv" "$out"
        done
        python3 "$here/store_report.py" "$out" --out "$out/store.json" ;;
    drafts)
        for way in ${WAYS:-none fixed upstream graphs ours}; do
            shown "drafts-$way" "^$way:" python3 "$here/drafts.py" $way "$work/wide" "$out" ${DRAFTS:-}
        done ;;
    chunks)
        for way in ${CHUNKS:-cost 512 2048 8192}; do
            shown "chunking-$way" "^$way:" python3 "$here/chunking.py" $way "$work/wide" "$out"
        done ;;
    invariance)
        for flags in "--dtype float32" "--dtype bfloat16" "--dtype bfloat16 --drafts" "--dtype bfloat16 --normal"; do
            log=$out/invariance${flags//[ -]/}.log
            timeout 400 python3 "$here/invariance.py" "$work/pair" "$out" $flags > "$log" 2>&1
            said "invariance $flags: exit code $?"; grep -E "^(float|bfloat)[0-9]+," "$log"
        done ;;
    pair) shown pair "^(none|auto|fixed)[,:]" python3 "$here/pair.py" "$work/pair" "$out" ;;
    *) echo "run.sh: no part $part: choose from doctor, kernels, store, fs, drafts, chunks, invariance, oracle, pair" >&2
        exit 2 ;;
esac; done
