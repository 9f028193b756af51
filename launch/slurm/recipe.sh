#!/usr/bin/env bash
# The paper's recipe, or its training problems, as one Slurm job that goes on by itself until all of it is done: each part
# starts the processes that it needs on these nodes (launch/slurm/train.sh) and ends them. Near the time limit the part that
# runs saves and ends, and the job puts itself back into the queue; after a node failure Slurm does that. What is finished is
# not started again.
#   sbatch --nodes=8 launch/slurm/recipe.sh qwen3_14b                    from the root of the checkout; FLAGS may follow
#   sbatch --nodes=8 launch/slurm/recipe.sh data qwen3_32b               launch/data.sh likewise: before the first of these
# `scancel JOB` ends it; the same command goes on where it was. `scancel --batch --signal=TERM JOB` ends it politely and
# puts it back into the queue.
# Environment: what launch/recipe.sh (or data.sh) and launch/slurm/train.sh name; SCALE (default mi300x_64).
# Logs: the job's own output says which part runs; those of its processes lie in RUNS/recipe/PART/.
#SBATCH --job-name=rstar2-recipe
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@600
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" # Slurm runs a copy of this file
script=recipe
[ "${1:-}" != data ] || { script=data; shift; }
[ $# -ge 1 ] || { echo "recipe: usage: sbatch --nodes=N launch/slurm/recipe.sh [data] MODEL [FLAGS...]" >&2; exit 2; }
[ -f launch/$script.sh ] || { echo "recipe: submit this from the root of the checkout, not from $PWD" >&2; exit 2; }
export START="bash launch/slurm/train.sh" VENV=${VENV:?set VENV to a virtual environment that holds rstar2-jax}
MODEL=$1
shift

child=
trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' TERM
bash launch/$script.sh "$MODEL" "${SCALE:-mi300x_64}" "$@" &
child=$!
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ends only the waiting
    code=0
    wait "$child" || code=$?
done
# 75: stopped, goes on. Not when the job is being cancelled, which ends its processes in the same way.
if [ "$code" = 75 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    echo "recipe: job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
