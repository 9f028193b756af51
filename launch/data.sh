#!/usr/bin/env bash
# The training problems of stages 1 and 2, out of the published sets: DAPO-Math-17K and Project Euler as far as their texts
# and answers are fit (gin/data/raw_text.gin), the AoPS problems of OpenMathReasoning whose label a strong model confirms
# (gin/data/raw_labels.gin), joined as data/openmath_42k, which gin/data/openmath_42k.gin reads. Run the same command again
# to go on where it was stopped, between two chunks of answers as well; exit codes as of launch/recipe.sh.
#   launch/data.sh MODEL SCALE [FLAGS...]
# MODEL  the strong model that is asked: qwen3_32b (the paper's choice) or another file of gin/model; SCALE likewise. On a
#        cluster: launch/slurm/recipe.sh data MODEL, launch/k8s/recipe.sh data MODEL.
# FLAGS  are given to every part, such as --dry_run.
# Environment: VENV (default .venv), RUNS (default runs/data), OUT (default data/openmath_42k), RAW (a folder with a folder
# for each published set; default reads them from the hub), SEED, REDIS, MODEL_FOLDER. The evaluation sets that problems are
# held against come from where gin/data/raw_labels.gin says; elsewhere with --gin_bindings="Curation.against=(...)".
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { echo "data: usage: launch/data.sh MODEL SCALE [FLAGS...]" >&2; exit 2; }
MODEL=$1 SCALE=$2
shift 2
flags=("$@")
RUNS=${RUNS:-runs/data}
OUT=${OUT:-data/openmath_42k}
. launch/parts.sh
check_here curate.gin

set_of() { # NAME RULES : a published set through one file of rules
    local place=()
    [ -z "${RAW:-}" ] || place=(--gin_bindings="Task.path='$RAW/$1'")
    part "$1" curate.gin %MODEL_FOLDER --gin_file="data/$1.gin" --gin_file="data/$2.gin" "${place[@]}"
}

set_of openmath_reasoning raw_labels
set_of dapo_17k raw_text
set_of project_euler raw_text
[ -n "$dry" ] || exec "$VENV/bin/python" -m rstar2_jax.data.join "$OUT" "$RUNS"/{openmath_reasoning,dapo_17k,project_euler}
