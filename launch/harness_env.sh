#!/usr/bin/env bash
# Prepares an environment with sgl-eval and OpenAI's client (0.6 GB): `make test-harness` runs them against the endpoint.
# Apart from the others, since harnesses pin what they need. Safe to repeat; a second run takes no time.
# Environment: VENV_HARNESS (default .venv-harness), PYTHON (default: a Python 3.11 or 3.12 that works).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV_HARNESS:-.venv-harness}

fail() { echo "harness_env: $*" >&2; exit 1; }

stamp=$(sha256sum <launch/harness_env.sh | cut -c1-16)-$PWD
[ "$(cat "$VENV/.installed" 2>/dev/null)" = "$stamp" ] && exit 0
if [ -n "${PYTHON:-}" ]; then python=$(launch/find_python.sh "$PYTHON"); else
    python=$(launch/find_python.sh python3.12 || launch/find_python.sh python3.11) || fail "no Python 3.12 or 3.11 was found"
fi
echo "harness_env: sgl-eval in $VENV (0.6 GB, some minutes the first time)"
"$python" -m venv --clear "$VENV"
"$VENV/bin/python" -m pip --disable-pip-version-check install -qq --no-compile sgl-eval==0.1.3 openai==2.54.0 \
    math-verify==0.9.0 latex2sympy2_extended==1.11.0 || fail "the packages could not be installed"
"$VENV/bin/sgl-eval" list >/dev/null || fail "sgl-eval does not start"
echo "$stamp" >"$VENV/.installed"
