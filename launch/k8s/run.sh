#!/usr/bin/env bash
# One run file on Kubernetes, with the processes that it needs and no others: fills in launch/k8s/train.yaml, starts its
# servers and its trainers, waits for their end and takes them away. launch/slurm/train.sh is the same for Slurm.
#   launch/k8s/run.sh stage1.gin --workdir=/shared/runs/stage1 --gin_bindings="Run.init_from='/shared/runs/sft'"
# Needs kubectl, and the tool cluster of sandbox/deploy/kubernetes.yaml. Paths are those of the pods, where the shared file
# system is /shared. Environment: VENV (default .venv; to ask which processes there are), SCALE (default mi300x_64),
# NODES (replicas of servers, default 8), MODEL_FOLDER (default that of the model's file, below /shared).
# Exit codes: 0 done; 2 a wrong configuration; 1 the run raised; 75 stopped by SIGTERM or SIGINT: the same command goes on.
set -euo pipefail
FILE=${1:?name a run file, such as stage1.gin}
shift
here=$(cd "$(dirname "$0")" && pwd)
SCALE=${SCALE:-mi300x_64}
NODES=${NODES:-8}
kube() { kubectl --namespace=rstar2 "$@"; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stopped=
trap 'stopped=1' TERM INT
mkdir "$work/scale"
cat >"$work/scale/cluster.gin" <<EOF
# What the pods of train.yaml have, the sandbox's address excepted.
from __gin__ import dynamic_registration
from rstar2_jax import settings

settings.Fleet:
    engines = ('http://rollout-[0-$((NODES - 1))].rollout:[30000-30007]',)
    tensor_parallel = 1
settings.Sandbox.redis_url = 'redis://sandbox'
${MODEL_FOLDER:+MODEL_FOLDER = '$MODEL_FOLDER'}
EOF
facts=$("${VENV:-.venv}/bin/python" -m rstar2_jax.launch --gin_file="$FILE" --gin_file="scale/$SCALE.gin" \
    --gin_file="$work/scale/cluster.gin" "$@" --roles)
eval "$facts" # PROCESSES PLATFORM MEMORY_SHARE SERVERS SERVER_FLAGS SANDBOX

given=(FILE="$FILE" SCALE="$SCALE" FLAGS="${*@Q}" SERVER_FLAGS="$SERVER_FLAGS" NODES="$NODES" MODEL_FOLDER="${MODEL_FOLDER:-}")
[ "$PROCESSES" = 1 ] || given+=(JAX_COORDINATOR_ADDRESS=trainer-0.trainer:8476 JAX_NUM_PROCESSES="$PROCESSES")
[ -z "$PLATFORM" ] || given+=(JAX_PLATFORMS="$PLATFORM")
[ -z "$MEMORY_SHARE" ] || given+=(XLA_PYTHON_CLIENT_MEM_FRACTION="$MEMORY_SHARE")

# Pods of an earlier command end first, politely: what they did goes on from their checkpoints.
away() { kube delete --ignore-not-found --cascade=foreground --timeout=600s job/trainer statefulset/rollout configmap/run; }
away
kube create configmap run "${given[@]/#/--from-literal=}"
objects() { # LABEL : the objects of a role, with this run's counts
    sed -e "s/completions: 8/completions: $PROCESSES/; s/parallelism: 8/parallelism: $PROCESSES/" \
        -e "s/replicas: 8/replicas: $NODES/" "$here/train.yaml" | kube apply -l "app=$1" -f -
}
if [ "$SERVERS" -gt 0 ]; then # the trainers begin by connecting to every server
    objects rollout
    until kube rollout status --timeout=20s statefulset/rollout; do [ -z "$stopped" ] || { away; exit 75; }; done
fi
objects trainer

code=
while [ -z "$code" ]; do
    ended=$(kube get job/trainer -o 'jsonpath={.status.conditions[?(@.status=="True")].type}')
    case $ended in
        *Complete*) code=0 ;;
        *Failed*)
            code=1
            case " $(kube get pods -l app=trainer -o 'jsonpath={..terminated.exitCode}') " in *' 2 '*) code=2 ;; esac
            kube logs -l app=trainer --tail=20 --prefix >&2 || true
            ;;
        *)
            [ -z "$stopped" ] || code=75
            [ -n "$code" ] || { sleep "${LOOK_EVERY_S:-10}" & wait $! || true; } # a signal ends the waiting
            ;;
    esac
done
away # of a run that is stopped this is what stops it: its pods get SIGTERM and five minutes
exit "$code"
