#!/usr/bin/env bash
# The sandbox cluster under Slurm: the first node runs Redis and the master, every node runs a worker.
#   sbatch --nodes=4 --cpus-per-task=64 sandbox/deploy/slurm.sh
# Trainers find the address in $RUN_DIR/sandbox_url (mode 600); it stays valid when the job is requeued, since the file is
# written anew. Settings from the environment: VENV (a virtual environment with rstar2-sandbox), RUN_DIR, SLOTS,
# MIN_ISOLATION (namespaces, uid or plain: what a node may fall to), PORT.
#SBATCH --job-name=rstar2-sandbox
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
set -euo pipefail
VENV=${VENV:?set VENV to a virtual environment that holds rstar2-sandbox}
RUN_DIR=${RUN_DIR:-$PWD/runs/sandbox}
SLOTS=${SLOTS:-$((SLURM_CPUS_ON_NODE * 2))}
MIN_ISOLATION=${MIN_ISOLATION:-namespaces}
PORT=${PORT:-6379}

mkdir -p "$RUN_DIR"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
password=$(head -c 24 /dev/urandom | base64 | tr '+/' '-_')
umask 077
export RSTAR2_SANDBOX_REDIS_PASSWORD=$password

# Redis listens on the private network of the nodes; it holds no more than 8 GiB and has clients wait beyond that.
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap --export=ALL \
    "$VENV/bin/python" -m rstar2_sandbox master --bind "$head" --port "$PORT" --max_mib 8192 &
export RSTAR2_SANDBOX_REDIS_URL=redis://:$password@$head:$PORT
printf '%s\n' "$RSTAR2_SANDBOX_REDIS_URL" >"$RUN_DIR/sandbox_url.new"
mv "$RUN_DIR/sandbox_url.new" "$RUN_DIR/sandbox_url"

# A worker that ends is started again under the same name, so that it frees what its predecessor held.
srun --overlap --kill-on-bad-exit=0 --export=ALL,SLOTS,MIN_ISOLATION bash -c "
    while true; do
        $VENV/bin/python -m rstar2_sandbox worker --name \$(hostname) --slots $SLOTS --min_isolation $MIN_ISOLATION || true
        sleep 1
    done" &
trap 'kill %1 %2 2>/dev/null; wait' TERM INT
wait -n
