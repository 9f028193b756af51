#!/usr/bin/env bash
# The paper's recipe, or its training problems, on Kubernetes: each part through launch/k8s/run.sh, which names what it
# needs. Run it where the shared file system is mounted at /shared (a pod of ours will do, or a login host): what is finished
# is seen there. Ctrl-C or SIGTERM stops the part that runs with a checkpoint; the same command goes on.
#   launch/k8s/recipe.sh qwen3_14b [FLAGS...]
#   launch/k8s/recipe.sh data qwen3_32b [FLAGS...]      launch/data.sh likewise: before the first of these
# Environment: what launch/recipe.sh (or data.sh) and launch/k8s/run.sh name; SCALE (default mi300x_64), RUNS (default
# /shared/runs/MODEL).
set -euo pipefail
cd "$(dirname "$0")/../.."
script=recipe
[ "${1:-}" != data ] || { script=data; shift; }
[ $# -ge 1 ] || { echo "recipe: usage: launch/k8s/recipe.sh [data] MODEL [FLAGS...]" >&2; exit 2; }
MODEL=$1
shift
export START="bash launch/k8s/run.sh" RUNS=${RUNS:-/shared/runs/$MODEL}
exec bash launch/$script.sh "$MODEL" "${SCALE:-mi300x_64}" "$@"
