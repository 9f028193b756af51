#!/usr/bin/env bash
# Every point of a grid as a run of its own, named by what it binds; then the comparison of all of them.
#   launch/sweep.sh OUT AXIS... -- FLAGS...
# AXIS   NAME=VALUE|VALUE|...   NAME is `seed`, `steps`, `gin_file` (- stands for no file), `name` (names the folder
#        and binds nothing) or anything that --gin_bindings takes, such as Roc.p_floor='0.1|0.01' or Roc.positives="'inverse'|'greedy'".
# FLAGS  what every run is given; {seed} in them is the seed of the point, {point} its folder.
# A point's folder is OUT/NAME=VALUE,.../seedN (only the name of a gin_file; no seedN without that axis). Points that are
# finished cost a start each: run the same command again to go on.
# Environment: VENV (default .venv), JOBS (runs at once, default 1), CORES (1: each on a core of its own, default 0),
# SUB (a run's folder inside that of its point, such as evaluation; default none).
# Example: launch/sweep.sh runs/floor 'Roc.p_floor=0.1|0.01' 'seed=0|1' -- --gin_file=stage1.gin \
#     --gin_file=model/box.gin --gin_file=scale/box.gin --gin_bindings="Run.init_from='runs/box/sft'" --steps=40
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
VENV=${VENV:-$root/.venv}
JOBS=${JOBS:-1}
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}
# As in box.sh.
export MALLOC_MMAP_THRESHOLD_=268435456 MALLOC_TRIM_THRESHOLD_=1073741824
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1

fail() { echo "sweep: $*" >&2; exit 2; }
[ -n "${1:-}" ] || fail "usage: launch/sweep.sh OUT AXIS... -- FLAGS..."
out=$1
shift
axes=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in *=*) axes+=("$1") ;; *) fail "axis '$1': write NAME=VALUE|VALUE" ;; esac
    shift
done
[ "${1:-}" = -- ] || fail "-- and the flags of every run are missing"
shift
mkdir -p "$out"

point() {  # point FOLDER SEED FLAG... : one run, its output beside it
    local folder=$1 seed=$2 flag flags=()
    shift 2
    for flag in "$@"; do
        flag=${flag//\{seed\}/$seed}
        flags+=("${flag//\{point\}/$out/$folder}")
    done
    folder=$folder${SUB:+/$SUB}
    mkdir -p "$out/$folder"
    local pin=() core
    for ((core = 0; core < JOBS && ${CORES:-0}; core++)); do  # a free core, kept until this run is over
        exec {lock}>"$out/.core$core"
        if flock -n "$lock"; then pin=(taskset -c "$core"); break; fi
        exec {lock}>&-
    done
    local code=0
    "${pin[@]}" "$VENV/bin/python" -m rstar2_jax.launch --workdir="$out/$folder" "${flags[@]}" \
        >>"$out/$folder/sweep.log" 2>&1 || code=$?
    case $code in
        0) echo "sweep: $folder done" ;;
        75) echo "sweep: $folder was stopped and has a checkpoint" >&2 ;;  # stops.INTERRUPTED
        76) echo "sweep: $folder collapsed and ended there" ;;             # stops.COLLAPSED
        *) echo "sweep: $folder FAILED, see $out/$folder/sweep.log" >&2 ;;
    esac
    case $code in 0 | 76) ;; *) touch "$out/.failed" ;; esac
}

walk() {  # walk AXIS_NUMBER NAME SEED FLAG... : the grid, depth first
    local number=$1 name=$2 seed=$3 value axis values
    shift 3
    if [ "$number" -eq "${#axes[@]}" ]; then
        while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || true; done
        local folder=${name:-plain}
        [ -z "$seed" ] || folder=${name:+$name/}seed$seed
        point "$folder" "$seed" "$@" &
        return
    fi
    axis=${axes[$number]%%=*}
    IFS='|' read -ra values <<<"${axes[$number]#*=}"
    for value in "${values[@]}"; do
        local label=${value//[\'\" ]/}
        label=${label//\//_}
        local more=${name:+$name,}
        case $axis in
            seed) walk $((number + 1)) "$name" "$value" "$@" --seed="$value" ;;
            name) walk $((number + 1)) "$more$label" "$seed" "$@" ;;
            steps) walk $((number + 1)) "${more}steps=$value" "$seed" "$@" --steps="$value" ;;
            gin_file)
                if [ "$value" = - ]; then
                    walk $((number + 1)) "${more}plain" "$seed" "$@"
                else
                    label=$(basename "$value" .gin)
                    walk $((number + 1)) "$more$label" "$seed" "$@" --gin_file="$value"
                fi
                ;;
            *) walk $((number + 1)) "$more$axis=$label" "$seed" "$@" --gin_bindings="$axis=$value" ;;
        esac
    done
}

rm -f "$out/.failed"
walk 0 "" "" "$@"
wait
[ ! -e "$out/.failed" ] || fail "some runs did not end; mend the cause where one failed, and run the same command again"
