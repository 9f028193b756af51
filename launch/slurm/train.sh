#!/usr/bin/env bash
# One run file on whole nodes under Slurm, with the processes that it needs and no others (rstar2_jax/roles.py says which):
# for a stage of RL an SGLang server on every GPU, a sandbox worker on every node's CPU cores, Redis on the first node and
# one trainer process a node; for evaluation and curation the same servers and sandbox, and one process on the first node
# that holds the model in host memory; for SFT the trainers alone; for export one process.
#   sbatch --nodes=8 launch/slurm/train.sh stage1.gin
#   sbatch --nodes=8 launch/slurm/train.sh stage1.gin --gin_bindings='Run.init_from="runs/sft"'
#   sbatch --nodes=8 launch/slurm/train.sh eval.gin --gin_file=data/aime25.gin --workdir=runs/eval_aime25
# Environment: VENV (a virtual environment with rstar2-jax[rocm] and rstar2-sandbox), SGLANG_PYTHON (the Python of AMD's
# SGLang image with our wheel installed by `pip install --no-deps`), MODEL_FOLDER (config.json and tokenizer of the model;
# default that of the model's gin file), SCALE (of gin/scale, default mi300x_64; mi300x_8 for one node), TENSOR_PARALLEL
# (GPUs of one server, default 1), SANDBOX_URL (a sandbox cluster that runs already; none is started then), RUN_DIR (logs,
# on the shared file system), SERVERS_WITHIN_S (longest wait for all servers, default 1800).
# Exit codes: those of the run file (launch.py); 75 when it was stopped by SIGTERM: the same command goes on.
#SBATCH --job-name=rstar2-train
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
set -euo pipefail
FILE=${1:?name a run file, such as stage1.gin}
shift
VENV=${VENV:?set VENV to a virtual environment that holds rstar2-jax and rstar2-sandbox}
SCALE=${SCALE:-mi300x_64}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
RUN_DIR=${RUN_DIR:-$PWD/runs/slurm-$SLURM_JOB_ID}
FIRST_PORT=30000
export SLURM_CPU_BIND=none # each role may use all cores of its node

fail() { echo "train: $*" >&2; exit 2; }

# SIGTERM, from Slurm before the time limit or from whoever started this, goes on to the trainer, which saves and ends.
stopped= told= trainer=
tell() { [ -n "$told" ] || [ -z "$trainer" ] || { told=1; kill -TERM "$trainer" 2>/dev/null || true; }; } # a second kills
trap 'stopped=1; tell' TERM
# What else was started ends with this script, so that the next run file finds the GPUs and ports free.
others=()
end_others() { for pid in "${others[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done; wait; }
trap end_others EXIT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
servers=$((8 / TENSOR_PARALLEL))
engines=$(printf "'http://%s:[$FIRST_PORT-$((FIRST_PORT + servers - 1))]', " "${nodes[@]}")
mkdir -p "$RUN_DIR/scale"
if [ -z "${SANDBOX_URL:-}" ]; then
    password=$(head -c 24 /dev/urandom | base64 | tr '+/' '-_')
    redis=redis://:$password@$head:6379
else
    redis=$SANDBOX_URL
fi
# What this allocation is, as an overlay: a run file takes of it what it has use for, where a flag would have to fit. A file
# also keeps the password out of the processes' command lines.
overlay=$RUN_DIR/scale/cluster.gin
(umask 077; rm -f "$overlay"; cat >"$overlay" <<EOF
# The nodes of Slurm job $SLURM_JOB_ID.
from __gin__ import dynamic_registration
from rstar2_jax import settings

settings.Fleet:
    engines = ($engines)
    tensor_parallel = $TENSOR_PARALLEL
settings.Sandbox.redis_url = '$redis'
${MODEL_FOLDER:+MODEL_FOLDER = '$MODEL_FOLDER'}
EOF
)
command=("$VENV/bin/python" -m rstar2_jax.launch "--gin_file=$FILE" "--gin_file=scale/$SCALE.gin" "--gin_file=$overlay" "$@")
facts=$("${command[@]}" --roles)
eval "$facts" # PROCESSES PLATFORM MEMORY_SHARE SERVERS SERVER_FLAGS SANDBOX
if [ "$PROCESSES" -gt 1 ] && [ "$PROCESSES" != "${#nodes[@]}" ]; then
    fail "the mesh of $FILE with $SCALE has $PROCESSES nodes, this allocation ${#nodes[@]}: ask for --nodes=$PROCESSES"
fi

if [ "$SANDBOX" = 1 ] && [ -z "${SANDBOX_URL:-}" ]; then
    export RSTAR2_SANDBOX_REDIS_PASSWORD=$password RSTAR2_SANDBOX_REDIS_URL=$redis
    srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap --export=ALL \
        "$VENV/bin/python" -m rstar2_sandbox master --bind "$head" --port 6379 --max_mib 8192 &
    others+=($!)
    # Half of the node's cores: the other half feeds the GPUs.
    srun --overlap --export=ALL --open-mode=append --output="$RUN_DIR/sandbox-%N.log" bash -c "
        trap 'exit 0' TERM
        while true; do
            $VENV/bin/python -m rstar2_sandbox worker --name \$(hostname) --slots \$((SLURM_CPUS_ON_NODE / 2)) || true
            sleep 1
        done" &
    others+=($!)
fi

if [ "$SERVERS" -gt 0 ]; then
    SGLANG_PYTHON=${SGLANG_PYTHON:?set SGLANG_PYTHON to the Python that has sglang}
    # A server that ends is started again; the trainer gives it the current weights and takes it back. It keeps nothing,
    # so at the end it is killed.
    srun --overlap --export=ALL --open-mode=append --output="$RUN_DIR/rollout-%N.log" bash -c "
        trap 'trap - TERM; kill -KILL 0' TERM
        for ((i = 0; i < $servers; i++)); do
            gpus=\$(seq -s, \$((i * $TENSOR_PARALLEL)) \$(((i + 1) * $TENSOR_PARALLEL - 1)))
            (while true; do
                HIP_VISIBLE_DEVICES=\$gpus $SGLANG_PYTHON -m sglang.launch_server $SERVER_FLAGS \
                    --port \$(($FIRST_PORT + i)) || true
                sleep 5
            done) &
        done
        wait" &
    others+=($!)
    give_up=$((SECONDS + ${SERVERS_WITHIN_S:-1800}))
    for node in "${nodes[@]}"; do
        for ((i = 0; i < servers; i++)); do
            until curl -sf -m 5 "http://$node:$((FIRST_PORT + i))/model_info" >/dev/null; do
                [ -z "$stopped" ] || exit 75
                if [ "$SECONDS" -ge "$give_up" ]; then
                    echo "train: no server at http://$node:$((FIRST_PORT + i)): see $RUN_DIR/rollout-$node.log" >&2
                    exit 1
                fi
                sleep 5
            done
        done
    done
fi
[ -z "$stopped" ] || exit 75

where=(--nodes=1 --ntasks=1 --nodelist="$head")
if [ "$PROCESSES" -gt 1 ]; then # one process a node: JAX finds the node's eight GPUs by itself
    where=()
    export JAX_COORDINATOR_ADDRESS=$head:8476 JAX_NUM_PROCESSES=$PROCESSES
fi
[ -z "$PLATFORM" ] || export JAX_PLATFORMS=$PLATFORM
[ -z "$MEMORY_SHARE" ] || export XLA_PYTHON_CLIENT_MEM_FRACTION=$MEMORY_SHARE
srun "${where[@]}" --overlap --export=ALL --open-mode=append --output="$RUN_DIR/trainer-%N.log" bash -c "
    export JAX_PROCESS_ID=\$SLURM_NODEID
    exec ${command[*]@Q}" &
trainer=$!
[ -z "$stopped" ] || tell
code=0
wait "$trainer" || code=$?
while kill -0 "$trainer" 2>/dev/null; do # a signal ends only the waiting
    code=0
    wait "$trainer" || code=$?
done
[ -z "$stopped" ] || [ "$code" = 0 ] || code=75
exit "$code"
