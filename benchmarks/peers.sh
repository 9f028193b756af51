#!/usr/bin/env bash
# Environments of the packages that the benchmarks are held against, each of its own: benchmarks/peers.sh [FOLDER]
#   FOLDER/tunix   google-tunix 0.1.7 with the JAX that it resolves to
#   FOLDER/torch   torch 2.13.0 (CPU build) and transformers 5.24.0
# Repeating it takes no time; an environment without its .complete file is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."
peers=${1:-${PEERS:-$PWD/.venv-peers}}
python=${PYTHON:-$(launch/find_python.sh python3.11)}

make_environment() {
    local folder=$peers/$1
    shift
    [ -e "$folder/.complete" ] && return
    rm -rf "$folder"
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install -q --upgrade pip
    "$folder/bin/python" -m pip install -q "$@"
    touch "$folder/.complete"
}

[[ $(/sbin/ldconfig -p) == *libtcmalloc_minimal* ]] || echo "peers: install libtcmalloc-minimal4, or train_step.py measures page faults as well" >&2
make_environment tunix google-tunix==0.1.7
make_environment torch torch==2.13.0 transformers==5.24.0 numpy
echo "$peers"
