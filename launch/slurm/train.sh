#!/usr/bin/env bash
# One stage of RL on whole nodes under Slurm: an SGLang server on every GPU, a sandbox worker on every node's CPU cores,
# Redis on the first node, one trainer process a node.
#   sbatch --nodes=8 launch/slurm/train.sh stage1.gin
#   sbatch --nodes=8 launch/slurm/train.sh stage1.gin --gin_bindings='Run.init_from="runs/sft"'
# Environment: VENV (a virtual environment with rstar2-jax[rocm] and rstar2-sandbox), SGLANG_PYTHON (the Python of AMD's
# SGLang image with our wheel installed by `pip install --no-deps`), MODEL_FOLDER (config.json and tokenizer of the model),
# SCALE (of gin/scale, default mi300x_64; mi300x_8 for one node), TENSOR_PARALLEL (GPUs of one server, default 1),
# SANDBOX_URL (a sandbox cluster that runs already; none is started then), RUN_DIR (logs). Stopping with SIGTERM leaves a
# checkpoint; the same command goes on from it.
#SBATCH --job-name=rstar2-train
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
set -euo pipefail
STAGE=${1:?name a stage, such as stage1.gin}
shift
VENV=${VENV:?set VENV to a virtual environment that holds rstar2-jax and rstar2-sandbox}
DTYPE=${DTYPE:-bfloat16}  # of the servers, as Model.compute_dtype: they take weights of their own dtype only
SGLANG_PYTHON=${SGLANG_PYTHON:?set SGLANG_PYTHON to the Python that has sglang}
MODEL_FOLDER=${MODEL_FOLDER:?set MODEL_FOLDER to a folder with config.json and tokenizer.json}
SCALE=${SCALE:-mi300x_64}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
RUN_DIR=${RUN_DIR:-$PWD/runs/slurm-$SLURM_JOB_ID}
FIRST_PORT=30000
CONTEXT_TOKENS=${CONTEXT_TOKENS:-14337}
SHARE=0.45   # of a GPU's memory, for SGLang and for the trainer each (rstar2_jax/roles.py)

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
servers=$((8 / TENSOR_PARALLEL))
mkdir -p "$RUN_DIR"
trap 'kill -TERM "${trainer:-}" 2>/dev/null; wait "${trainer:-}"' TERM

if [ -z "${SANDBOX_URL:-}" ]; then
    umask 077
    password=$(head -c 24 /dev/urandom | base64 | tr '+/' '-_')
    export RSTAR2_SANDBOX_REDIS_PASSWORD=$password
    SANDBOX_URL=redis://:$password@$head:6379
    export RSTAR2_SANDBOX_REDIS_URL=$SANDBOX_URL
    srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap --export=ALL \
        "$VENV/bin/python" -m rstar2_sandbox master --bind "$head" --port 6379 --max_mib 8192 &
    # Half of the node's cores: the other half feeds the GPUs.
    srun --overlap --export=ALL --output="$RUN_DIR/sandbox-%N.log" bash -c "
        while true; do
            $VENV/bin/python -m rstar2_sandbox worker --name \$(hostname) --slots \$((SLURM_CPUS_ON_NODE / 2)) || true
            sleep 1
        done" &
fi

# A server that ends is started again; the trainer gives it the current weights and takes it back.
srun --overlap --export=ALL --output="$RUN_DIR/rollout-%N.log" bash -c "
    for ((i = 0; i < $servers; i++)); do
        gpus=\$(seq -s, \$((i * $TENSOR_PARALLEL)) \$(((i + 1) * $TENSOR_PARALLEL - 1)))
        (while true; do
            HIP_VISIBLE_DEVICES=\$gpus $SGLANG_PYTHON -m sglang.launch_server --model-path $MODEL_FOLDER \
                --load-format dummy --dtype $DTYPE --tp-size $TENSOR_PARALLEL --context-length $CONTEXT_TOKENS \
                --mem-fraction-static $SHARE --host 0.0.0.0 --port \$(($FIRST_PORT + i)) || true
            sleep 5
        done) &
    done
    wait" &

engines=$(printf "'http://%s:[$FIRST_PORT-$((FIRST_PORT + servers - 1))]'," "${nodes[@]}")
for node in "${nodes[@]}"; do
    for ((i = 0; i < servers; i++)); do
        until curl -sf -m 5 "http://$node:$((FIRST_PORT + i))/model_info" >/dev/null; do sleep 5; done
    done
done

# One process a node: JAX finds the node's eight GPUs by itself.
export JAX_COORDINATOR_ADDRESS=$head:8476 JAX_NUM_PROCESSES=$SLURM_NNODES XLA_PYTHON_CLIENT_MEM_FRACTION=$SHARE
srun --overlap --export=ALL --output="$RUN_DIR/trainer-%N.log" bash -c "
    export JAX_PROCESS_ID=\$SLURM_NODEID
    exec $VENV/bin/python -m rstar2_jax.launch --gin_file=$STAGE --gin_file=scale/$SCALE.gin \
        --gin_bindings=\"Fleet.engines=($engines)\" --gin_bindings=\"Fleet.tensor_parallel=$TENSOR_PARALLEL\" \
        --gin_bindings=\"Sandbox.redis_url='$SANDBOX_URL'\" --gin_bindings=\"MODEL_FOLDER='$MODEL_FOLDER'\" ${*@Q}" &
trainer=$!
wait "$trainer"
