#!/usr/bin/env bash
# Prepares an environment in which a real SGLang server runs on a CPU (2.6 GB, Python 3.11): `make test-sglang` uses it.
# For tests only: such a server makes some dozens of tokens a second. Safe to repeat; a second run takes no time.
# Environment: VENV_SGLANG (default .venv-sglang), PYTHON (default: a Python 3.11 that works).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV_SGLANG:-.venv-sglang}
SGLANG=0.5.23
TORCH=2.13.0

fail() { echo "sglang_env: $*" >&2; exit 1; }

python=$(launch/find_python.sh "${PYTHON:-python3.11}") || fail "SGLang's recipe here is for Python 3.11, and none was found"
stamp=$(cat setup.py launch/sglang_env.sh launch/sglang_cpu/*.py launch/sglang_cpu/*/*.py | sha256sum | cut -c1-16)-$PWD
[ "$(cat "$VENV/.installed" 2>/dev/null)" = "$stamp" ] && exit 0

echo "sglang_env: SGLang $SGLANG in $VENV (2.6 GB, some minutes the first time)"
[ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$VENV"
pip() {  # Its complaints about what is left out on purpose go into a file, and are shown only where it fails.
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@" >"$VENV/pip.log" 2>&1 || { cat "$VENV/pip.log" >&2; fail "pip $*"; }
}
constraints=$VENV/constraints.txt
echo "torch==$TORCH" >"$constraints"
# What names CUDA packages as its own needs goes in without them; never without the constraint, or a CUDA torch comes.
pip install -qq --no-compile --no-deps "sglang==$SGLANG" transformers==5.19.0 tokenizers==0.23.2 xgrammar==0.2.7 triton \
    torchvision==0.28.0
pip install -qq --no-compile -c "$constraints" "torch==$TORCH" numpy aiohttp fastapi 'uvicorn>=0.51' uvloop orjson msgspec \
    pyzmq psutil setproctitle requests pydantic prometheus-client pybase64 python-multipart huggingface_hub safetensors regex \
    packaging pyyaml tqdm filelock tensorstore pillow ipython dill apache-tvm-ffi sentencepiece compressed_tensors gguf \
    openai partial_json_parser einops jsonschema soundfile 'setuptools>=77' wheel
# Stand-ins for what exists for CUDA only, and our own package for its plug-in: without its dependencies, JAX above all.
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r launch/sglang_cpu/. "$site/"
pip install -qq --no-compile --no-deps --no-build-isolation -e .
"$VENV/bin/python" -c 'import sglang, sgl_kernel, rstar2_jax.weights.sglang_loader' || fail "the environment does not import"
echo "$stamp" >"$VENV/.installed"
