#!/usr/bin/env bash
# The path of a real run on one machine: SmolLM2-135M out of an installed package, a few SFT steps on the tool-call
# format, three GRPO-RoC steps on GSM-Symbolic, AIME 2024, export, transformers' second opinion, summary. It learns
# little in that time and says so. Every part continues where it was stopped: run the same command again.
#   launch/box_real.sh [GSM8K_FOLDER]     RL on GSM8K instead, from a folder with train.jsonl and test.jsonl
# Environment: VENV (default .venv), SEED (default 0), RUNS (default runs/box-real), MODEL (the converted weights,
# default models/SmolLM2-135M-Instruct), GSM8K (the same as the argument), TORCH_PYTHON (a Python that has torch and
# transformers, default that of VENV).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
SEED=${SEED:-0}
MODEL=${MODEL:-models/SmolLM2-135M-Instruct}
GSM8K=${1:-${GSM8K:-}}
TORCH_PYTHON=${TORCH_PYTHON:-$VENV/bin/python}
RUNS=${RUNS:-runs/box-real}
mkdir -p "$RUNS"
RUNS=$(realpath "$RUNS")
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
# As in box.sh: keep freed memory instead of returning it after each step, and take more in huge pages.
export MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=1073741824
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1

stage() {  # stage NAME GIN_FILE INIT_FROM [more flags]
    local name=$1 file=$2 init=$3
    shift 3
    "$VENV/bin/python" -m rstar2_jax.launch --gin_file="$file" --gin_file=model/smollm2_135m.gin \
        --gin_file=scale/box_real.gin --workdir="$RUNS/$name" --seed="$SEED" \
        --gin_bindings="Run.init_from='$init'" "$@"
}

problems=()
if [ -n "$GSM8K" ]; then
    [ -f "$GSM8K/train.jsonl" ] || { echo "box_real: $GSM8K holds no train.jsonl of GSM8K" >&2; exit 2; }
    problems=(--gin_bindings="Task.source='gsm8k'" --gin_bindings="Task.path='$(realpath "$GSM8K")'")
fi

"$VENV/bin/python" -m rstar2_jax.io.smollm2 --out "$MODEL"
MODEL=$(realpath "$MODEL")
folder=(--gin_bindings="MODEL_FOLDER='$MODEL'")  # whose tokenizer the problems are read with
# Problems of the first stage (solutions of at most two steps), and rows no longer than a demonstration with one call.
stage sft sft.gin "$MODEL" --steps=20 --gin_bindings="Learner.row_tokens=640" "${folder[@]}" "${problems[@]}"
stage stage1 stage1.gin "$RUNS/sft" --steps=3 "${folder[@]}" "${problems[@]}"
# The problems of AIME are longer, and an evaluation leaves none out.
stage eval_rl eval.gin "$RUNS/stage1" "${folder[@]}" --gin_bindings="Task.source='aime24'" \
    --gin_bindings="Rollout.prompts_per_step=30" --gin_bindings="Rollout.max_prompt_tokens=864"
stage export export.gin "$RUNS/stage1" --gin_bindings="export.export.dtype='float32'"
if "$TORCH_PYTHON" -c 'import torch, transformers' 2>/dev/null; then
    # A difference ends up in the summary, which then ends with exit status 1.
    "$TORCH_PYTHON" launch/check_export.py "$RUNS/export" || true
else
    echo "box_real: torch or transformers is NOT installed for $("$TORCH_PYTHON" --version 2>&1): the export was not held" \
        "to transformers. Name a Python that has both in TORCH_PYTHON and run this command again."
fi
"$VENV/bin/python" -m rstar2_jax.report.real "$RUNS"
