#!/usr/bin/env bash
# The paper's recipe as one command: evaluation of the base model, SFT, evaluation, RL stages 1 and 2, the filter of hard
# problems, stage 3, evaluation of four sets, export. What is finished is left as it is; run the same command again to go
# on where it was stopped, in the middle of a stage as well.
#   launch/recipe.sh MODEL SCALE [FLAGS...]
# MODEL  a file of gin/model without .gin: qwen3_14b, qwen2_5_32b, ... ; SCALE likewise of gin/scale: mi300x_8, ...
#        (small models, on one GPU: qwen3_0_6b, qwen3_1_7b or qwen3_4b with mi300x_1)
# FLAGS  are given to every part, such as --dry_run, which says of each part what would run and starts nothing.
# Environment: VENV (default .venv), RUNS (default runs/MODEL), SEED (default 0), REDIS (address of the tool cluster's Redis,
# which mi300x_64 asks for).
# Format skill before and after SFT: the field `format` in RUNS/eval_base/evaluation.json and RUNS/eval_sft/evaluation.json.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
[ $# -ge 2 ] || { echo "recipe: usage: launch/recipe.sh MODEL SCALE [FLAGS...]" >&2; exit 2; }
MODEL=$1 SCALE=$2
shift 2
for file in "gin/model/$MODEL.gin" "gin/scale/$SCALE.gin"; do
    [ -f "$file" ] || { echo "recipe: there is no $file" >&2; exit 2; }
done
RUNS=${RUNS:-runs/$MODEL}
model=()
[ "$MODEL" = qwen3_14b ] || model=(--gin_file="model/$MODEL.gin")  # the run files include that one

part() {  # part NAME GIN_FILE INIT_FROM [more flags] : no INIT_FROM keeps what the file says
    local name=$1 file=$2 init=()
    [ -z "$3" ] || init=(--gin_bindings="Run.init_from='$3'")
    case ${REDIS:+$file} in
        '' | sft.gin | export.gin) ;;  # these have no sandbox
        *) init+=(--gin_bindings="settings.Sandbox.redis_url='$REDIS'") ;;
    esac
    shift 3
    echo "recipe: $name"
    "$VENV/bin/python" -m rstar2_jax.launch --gin_file="$file" "${model[@]}" --gin_file="scale/$SCALE.gin" \
        --workdir="$RUNS/$name" --seed="${SEED:-0}" "${init[@]}" "$@"
}

part eval_base eval.gin '' --gin_bindings="Run.init_from=%MODEL_FOLDER" "$@"
part sft sft.gin '' "$@"
part eval_sft eval.gin "$RUNS/sft" "$@"
part stage1 stage1.gin "$RUNS/sft" "$@"
part stage2 stage2.gin "$RUNS/stage1" "$@"
part curate curate.gin "$RUNS/stage2" "$@"
part stage3 stage3.gin "$RUNS/stage2" --gin_bindings="Task.source='jsonl'" --gin_bindings="Task.path='$RUNS/curate'" "$@"
for set in aime24 aime25 hmmt25 math_500; do
    more=()
    [ "$set" = aime24 ] || more=(--gin_file="data/$set.gin")  # eval.gin includes that one
    part "eval_$set" eval.gin "$RUNS/stage3" "${more[@]}" "$@"
done
part export export.gin "$RUNS/stage3" "$@"
