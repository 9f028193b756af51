#!/usr/bin/env bash
# The whole job on one machine: SFT, evaluation, three RL stages with the hard-problem filter before the last one,
# evaluation, export, summary. Every stage continues where it was stopped: run the same command again.
#   launch/box.sh [RUNS_DIR]            default runs/box
# Environment: VENV (default .venv), SEED (default 0).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
SEED=${SEED:-0}
mkdir -p "${1:-runs/box}"
RUNS=$(realpath "${1:-runs/box}")
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
# Keep freed memory instead of returning it after each step: XLA on CPU allocates and frees the same buffers all the time.
# Large ones come from the system in any case, in huge pages: one page at a time they cost a sixth of a step of
# benchmarks/train_step.py.
export MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=1073741824
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1

stage() {  # stage NAME GIN_FILE INIT_FROM [more flags]
    local name=$1 file=$2 init=$3
    shift 3
    "$VENV/bin/python" -m rstar2_jax.launch --gin_file="$file" --gin_file=model/box.gin --gin_file=scale/box.gin \
        --workdir="$RUNS/$name" --seed="$SEED" --gin_bindings="Run.init_from='$init'" "$@"
}

# Demonstrations and evaluations show every length of number, stages 1 and 2 the shorter ones; the hard-problem filter
# asks for the longest. The token budget rises once, as in the paper.
longer=(--gin_bindings="Rollout.max_response_tokens=144" --gin_bindings="Learner.row_tokens=176")
asked=(--gin_bindings="Task.difficulty=3" --gin_bindings="Rollout.max_response_tokens=144"
    --gin_bindings="Rollout.prompts_per_step=128")
stage sft sft.gin '' --steps=900 --gin_bindings="Task.difficulty=3"
stage eval_sft eval.gin "$RUNS/sft" "${asked[@]}"
stage stage1 stage1.gin "$RUNS/sft" --steps=25
stage stage2 stage2.gin "$RUNS/stage1" --steps=20 "${longer[@]}"
stage curate curate.gin "$RUNS/stage2" --gin_bindings="Rollout.prompts_per_step=320" \
    --gin_bindings="Rollout.max_response_tokens=144"
stage stage3 stage3.gin "$RUNS/stage2" --steps=35 "${longer[@]}" \
    --gin_bindings="Task.source='jsonl'" --gin_bindings="Task.path='$RUNS/curate'"
stage eval_rl eval.gin "$RUNS/stage3" "${asked[@]}"
stage export export.gin "$RUNS/stage3"
"$VENV/bin/python" -m rstar2_jax.report.summary "$RUNS"
