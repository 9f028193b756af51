#!/usr/bin/env bash
# Prints the path of a Python that runs and is 3.11 or 3.12, given its name or path; exit code 1 when there is none.
# A name on PATH can be a version manager's shim that refuses to run, so each candidate is tried.
set -uo pipefail
name=$1

works() {
    [ -n "$1" ] && "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}

path=$(command -v "$name" || true)
if works "$path"; then "$path" -c 'import sys; print(sys.executable)'; exit 0; fi
if command -v pyenv >/dev/null 2>&1; then
    want=${name#python}
    while read -r version; do
        case $version in "$want" | "$want".*) ;; *) continue ;; esac
        path=$(PYENV_VERSION=$version pyenv which python 2>/dev/null || true)
        if works "$path"; then echo "$path"; exit 0; fi
    done < <(pyenv versions --bare 2>/dev/null | sort -rV)
fi
exit 1
