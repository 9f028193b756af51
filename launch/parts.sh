# Parts of a recipe, run one after another: sourced by recipe.sh and data.sh, which name them. Each part is one run file.
# What is finished is not started again, and what was stopped goes on: a part is finished when its command ended with 0
# (recorded in $RUNS/recipe/NAME.finished, with its flags) and its result is still there.
#
# Takes: MODEL and SCALE (files of gin/), RUNS, VENV, SEED, REDIS, MODEL_FOLDER, START (a command that is given a run file
# and flags, and starts what the run needs on a cluster; empty runs it here), flags (an array, given to every part).
# SIGTERM and SIGINT go on to the part that runs, whose exit code 75 (stopped, go on with the same command) becomes ours.
RUNS=${RUNS:-runs/$MODEL}
VENV=${VENV:-.venv}
START=${START:-}
export SCALE
name_of_script=$(basename "$0" .sh)
state=$RUNS/recipe
dry=
for word in "${flags[@]}"; do case $word in --dry_run | --roles) dry=1 ;; esac done
for file in "gin/model/$MODEL.gin" "gin/scale/$SCALE.gin"; do
    [ -f "$file" ] || { echo "$name_of_script: there is no $file" >&2; exit 2; }
done
files=()
[ "$MODEL" = qwen3_14b ] || files=(--gin_file="model/$MODEL.gin") # the run files include that one
if [ -n "${MODEL_FOLDER:-}" ] && [ -z "$START" ]; then # an overlay, as not every part has a use for it
    mkdir -p "$state/model"
    cat >"$state/model/folder.gin" <<EOF
# Where the model's first weights and its tokenizer are.
from __gin__ import dynamic_registration

MODEL_FOLDER = '$MODEL_FOLDER'
EOF
    files+=(--gin_file="$state/model/folder.gin")
fi

stopped= told= child=
tell() { [ -n "$told" ] || [ -z "$child" ] || { told=1; kill -TERM "$child" 2>/dev/null || true; }; } # a second one kills
trap 'stopped=1; tell' TERM INT

until_it_ends() { # COMMAND... : its exit code; 75 when it was told to stop and did
    local code=0
    set -m # a process group of its own, so that Ctrl-C reaches it through us alone
    "$@" &
    child=$!
    set +m
    [ -z "$stopped" ] || tell
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ends only the waiting
        code=0
        wait "$child" || code=$?
    done
    child=
    [ -z "$stopped" ] || [ "$code" = 0 ] || code=75
    return "$code"
}

launch() { # FILE FLAGS... : the run file here, in place of this process
    local file=$1
    shift
    local environment=()
    # Without a learner or an engine inside it a run needs no device: a whole model in float32 lies in host memory.
    case $servers,$file in *,export.gin | [1-9]*,eval.gin | [1-9]*,curate.gin) environment=(JAX_PLATFORMS=cpu) ;; esac
    exec env "${environment[@]}" "$VENV/bin/python" -m rstar2_jax.launch --gin_file="$file" --gin_file="scale/$SCALE.gin" "$@"
}

servers=0
check_here() { # FILE : refuse a scale that one process here cannot be
    [ -z "$START$dry" ] || return 0
    local facts PROCESSES=1 SERVERS=0
    facts=$("$VENV/bin/python" -m rstar2_jax.launch --gin_file="$1" --gin_file="scale/$SCALE.gin" "${files[@]}" \
        --gin_bindings="Sandbox.redis_url='${REDIS:-}'" "${flags[@]}" --roles)
    eval "$facts"
    if [ "$PROCESSES" -gt 1 ]; then
        echo "$name_of_script: $SCALE has $PROCESSES nodes, and this would be one process without servers: use" \
            "launch/slurm/$name_of_script.sh or launch/k8s/$name_of_script.sh" >&2
        exit 2
    fi
    servers=$SERVERS
}

finished() { # NAME FILE FLAGS... : whether it ended well with these flags and its result is there
    local record=$state/$1.finished result
    case $2 in
        eval.gin) result=evaluation.json ;;
        curate.gin) result=train.jsonl ;;
        export.gin) result=export.json ;;
        *) result=checkpoints ;;
    esac
    [ -z "$dry" ] && [ -e "$RUNS/$1/$result" ] && [ "$(cat "$record" 2>/dev/null)" = "${*:2}" ]
}

part() { # NAME GIN_FILE INIT_FROM [more flags] : no INIT_FROM keeps what the file says
    local name=$1 file=$2 init=$3 code=0
    shift 3
    local own=("${files[@]}" --workdir="$RUNS/$name" --seed="${SEED:-0}")
    [ -z "$init" ] || own+=(--gin_bindings="Run.init_from=$init")
    if [ -z "$START" ]; then
        case ${REDIS:+$file} in
            '' | sft.gin | export.gin) ;; # these have no sandbox
            *) own+=(--gin_bindings="settings.Sandbox.redis_url='$REDIS'") ;;
        esac
    fi
    own+=("$@" "${flags[@]}")
    if finished "$name" "$file" "${own[@]}"; then
        echo "$name_of_script: $name is finished"
        return 0
    fi
    [ -z "$stopped" ] || exit 75
    echo "$name_of_script: $name"
    if [ -n "$START" ]; then
        # shellcheck disable=SC2086  # START is a command with words of its own
        RUN_DIR=$state/$name until_it_ends $START "$file" "${own[@]}" || code=$?
    else
        until_it_ends launch "$file" "${own[@]}" || code=$?
    fi
    case $code in
        0) ;;
        75) echo "$name_of_script: $name was stopped; the same command goes on" >&2; exit 75 ;;
        *) echo "$name_of_script: $name FAILED with exit code $code" >&2; exit "$code" ;;
    esac
    if [ -z "$dry" ]; then
        mkdir -p "$state"
        printf '%s\n' "$file ${own[*]}" >"$state/$name.finished"
    fi
}
