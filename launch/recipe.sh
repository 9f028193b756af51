#!/usr/bin/env bash
# The paper's recipe as one command: SFT, RL stages 1 and 2, the filter of hard problems, stage 3, export, evaluations of the
# base model and after each of them, and a table of these. What is finished is left as it is; run the same command again to
# go on where it was stopped, in the middle of a stage as well (exit code 75 says that it was stopped and goes on so).
#   launch/recipe.sh MODEL SCALE [FLAGS...]
# MODEL  a file of gin/model without .gin: qwen3_14b, qwen2_5_32b, ... ; SCALE likewise of gin/scale: mi300x_1, ...
#        (small models, on one GPU: qwen3_0_6b, qwen3_1_7b or qwen3_4b with mi300x_1). Here everything runs in one process
#        after another; of mi300x_8 the servers must run already (launch/README.md). Several nodes, or one with servers
#        that come and go by themselves: launch/slurm/recipe.sh, launch/k8s/recipe.sh.
# FLAGS  are given to every part, such as --dry_run, which says of each part what would run and starts nothing.
# Environment: VENV (default .venv), RUNS (default runs/MODEL), SEED (default 0), REDIS (address of a tool cluster's Redis;
# default is a private sandbox), MODEL_FOLDER (default that of the model's file), SETS (held-out sets that every model is
# asked, default "aime24 aime25"), LAST_SETS (those that the last one is asked as well, default "hmmt25 math_500").
# The problems of stages 1 and 2 come from launch/data.sh. Format skill before and after SFT: the field `format` of
# RUNS/eval_base_aime24/evaluation.json and RUNS/eval_sft_aime24/evaluation.json.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { echo "recipe: usage: launch/recipe.sh MODEL SCALE [FLAGS...]" >&2; exit 2; }
MODEL=$1 SCALE=$2
shift 2
flags=("$@")
. launch/parts.sh
check_here stage1.gin

asked() { # NAME INIT_FROM SETS... : the model of a part asked held-out sets
    local name=$1 init=$2 set more
    shift 2
    for set in "$@"; do
        more=()
        [ "$set" = aime24 ] || more=(--gin_file="data/$set.gin") # eval.gin includes that one
        part "eval_${name}_$set" eval.gin "$init" "${more[@]}"
    done
}

read -ra sets <<<"${SETS-aime24 aime25}"
read -ra last <<<"${LAST_SETS-hmmt25 math_500}"
asked base %MODEL_FOLDER "${sets[@]}"
part sft sft.gin ''
asked sft "'$RUNS/sft'" "${sets[@]}"
part stage1 stage1.gin "'$RUNS/sft'"
asked stage1 "'$RUNS/stage1'" "${sets[@]}"
part stage2 stage2.gin "'$RUNS/stage1'"
asked stage2 "'$RUNS/stage2'" "${sets[@]}"
part curate curate.gin "'$RUNS/stage2'"
part stage3 stage3.gin "'$RUNS/stage2'" --gin_bindings="Task.source='jsonl'" --gin_bindings="Task.path='$RUNS/curate'"
asked stage3 "'$RUNS/stage3'" "${sets[@]}" "${last[@]}"
part export export.gin "'$RUNS/stage3'"
[ -n "$dry" ] || "$VENV/bin/python" -m rstar2_jax.report.recipe "$RUNS"
