#!/usr/bin/env bash
# The study of RoC's effect on one machine: for each seed an SFT start of its own, from it every arm, an evaluation of
# each, then figure and table with 95% intervals. The design is fixed: benchmarks/RESULTS.md says what it is. Run the same
# command again to go on where it was stopped; seed after seed, so that what is there is always whole.
#   launch/study.sh [OUT]               default runs/study
# Environment: VENV (default .venv), JOBS (runs at once, one core each, default 2), and for a try alone SEEDS (default
# "0 1 2 3 4"), ARMS (default all six; any file of gin/ablation), SFT_STEPS, STEPS, PROBLEMS (evaluated, of each family),
# MODEL (of gin/model, default box), TASK (of gin/scale, given after study.gin; default none), FLAGS (more flags for RL
# and evaluation), BASELINE (default random_half, or the first arm where that is none).
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${1:-runs/study}"
OUT=$(realpath "${1:-runs/study}")
export JOBS=${JOBS:-2} CORES=1
SEEDS=${SEEDS:-0 1 2 3 4}
ARMS=${ARMS:-no_roc random_half plain greedy penalty_blind no_tool}
SFT_STEPS=${SFT_STEPS:-900}
STEPS=${STEPS:-120}
PROBLEMS=${PROBLEMS:-256}
MODEL=${MODEL:-box}
read -ra flags <<<"${FLAGS:-}"
FROM_STEP=$((STEPS > 40 ? 20 : STEPS / 2))

files=()
for arm in $ARMS; do
    if [ "$arm" = plain ]; then files+=(-); else files+=("ablation/$arm.gin"); fi
done
axes=("seed=$(tr -s ' ' '|' <<<"$SEEDS")" "gin_file=$(IFS='|'; echo "${files[*]}")")
box=(--gin_file="model/$MODEL.gin" --gin_file=scale/box.gin --gin_file=scale/study.gin)
[ -z "${TASK:-}" ] || box+=(--gin_file="scale/$TASK.gin")

launch/sweep.sh "$OUT/sft" "${axes[0]}" -- --gin_file=sft.gin "${box[@]}" --steps="$SFT_STEPS" \
    --gin_bindings="Run.init_from=''"
launch/sweep.sh "$OUT/arms" "${axes[@]}" -- --gin_file=stage1.gin "${box[@]}" "${flags[@]}" --steps="$STEPS" \
    --gin_bindings="Run.init_from='$OUT/sft/seed{seed}'"
for arm in $ARMS; do  # overlays speak of training; only the one without a tool changes what is asked
    if [ "$arm" = no_tool ]; then axis=gin_file=ablation/no_tool.gin; else axis=name=$arm; fi
    SUB=evaluation launch/sweep.sh "$OUT/arms" "${axes[0]}" "$axis" -- --gin_file=eval.gin "${box[@]}" "${flags[@]}" \
        --gin_bindings="Run.init_from='{point}'" --gin_bindings="Rollout.prompts_per_step=$PROBLEMS"
done
baseline=${BASELINE:-random_half}
case " $ARMS " in *" $baseline "*) ;; *) baseline=${ARMS%% *} ;; esac
"${VENV:-.venv}/bin/python" -m rstar2_jax.report.compare "$OUT/arms" --baseline "$baseline" --from_step "$FROM_STEP"
