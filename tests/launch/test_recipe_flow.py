"""The recipe's control flow, for real: its scripts under a scheduler of stubs that runs every command on this machine.

What the stubs stand for: Slurm's commands, SGLang's server, and a Python whose runs leave a result, take a while or
fail as the test says. The scripts, their signals and their exit codes are the real ones.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = (
    "eval_base_aime24 eval_base_aime25 sft eval_sft_aime24 eval_sft_aime25 stage1 eval_stage1_aime24 "
    "eval_stage1_aime25 stage2 eval_stage2_aime24 eval_stage2_aime25 curate stage3 eval_stage3_aime24 "
    "eval_stage3_aime25 eval_stage3_hmmt25 eval_stage3_math_500 export"
).split()

STUBS = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
export SLURM_NODEID=0
setsid "$@" &
step=$!
trap 'kill -TERM -- -$step' TERM
code=0; wait $step || code=$?
while kill -0 $step 2>/dev/null; do code=0; wait $step || code=$?; done
exit $code
""",
    "scontrol": """
case $1 in show) printf 'n0\\nn1\\n' ;; *) echo "$*" >>"$LOG/scontrol" ;; esac
""",
    "squeue": 'echo "${STATE:-RUNNING}"',
    "curl": """
url=${@: -1}
port=${url##*:}
kill -0 "$(cat "$LOG/up-${port%/*}")" 2>/dev/null
""",
    "sglang": """
echo "$*" >>"$LOG/servers"
echo $$ >>"$LOG/pids"
echo $$ >"$LOG/up-${@: -1}"
exec sleep 1000
""",
    "sleep": """
case $1 in 5) exec /bin/sleep 0.2 ;; *) exec /bin/sleep "$@" ;; esac
""",
    "python": """
case "$*" in
    *data.join*) echo "joined ${@: -3}"; exit ;;
    *report.recipe*) echo "the table of ${@: -1}"; exit ;;
    *rstar2_sandbox*) echo "$3 ${*: -1}" >>"$LOG/sandbox"; echo $$ >>"$LOG/pids"; exec sleep 1000 ;;
esac
for word in "$@"; do
    case $word in
        --workdir=*) dir=${word#*=} ;;
        --gin_file=*) [ -n "${file:-}" ] || file=${word#*=} ;;
    esac
done
part=$(basename "$dir")
case $file in
    sft.gin) processes=2 servers=0 sandbox=0 platform= result=checkpoints/5 ;;
    export.gin) processes=1 servers=0 sandbox=0 platform=cpu result=export.json ;;
    eval.gin) processes=1 servers=16 sandbox=1 platform=cpu result=evaluation.json ;;
    curate.gin) processes=1 servers=16 sandbox=1 platform=cpu result=train.jsonl ;;
    *) processes=2 servers=16 sandbox=1 platform= result=checkpoints/5 ;;
esac
if [ "${@: -1}" = --roles ]; then
    echo "PROCESSES=$processes; SERVERS=$servers; SANDBOX=$sandbox; PLATFORM=$platform; MEMORY_SHARE="
    echo "SERVER_FLAGS='--context-length 99'"
    exit
fi
echo "$part ${JAX_NUM_PROCESSES:-1} ${JAX_PLATFORMS:-gpu}" >>"$LOG/started"
if [ "${FAILS:-}" = "$part" ]; then exit "${WITH:-1}"; fi
if [ "${SLOW:-}" = "$part" ]; then
    trap 'exit ${STOPS_WITH:-75}' TERM
    touch "$LOG/waiting"
    for i in {1..600}; do sleep 0.1; done
fi
mkdir -p "$(dirname "$dir/$result")"
echo "$*" >"$dir/$result"
""",
}


@pytest.fixture
def cluster(tmp_path):
    """A folder with the stubs, and the environment in which they are found."""
    for name, text in STUBS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/usr/bin/env bash\n" + text)
        path.chmod(0o755)
    (tmp_path / "log").mkdir()
    return tmp_path, {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VENV": str(tmp_path),
        "SGLANG_PYTHON": str(tmp_path / "bin" / "sglang"),
        "LOG": str(tmp_path / "log"),
        "RUNS": str(tmp_path / "runs"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_CPUS_ON_NODE": "4",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


SLURM = ("launch/slurm/recipe.sh", "qwen3_14b")
HERE = ("launch/recipe.sh", "qwen3_1_7b", "mi300x_1")


def run(given, *words, **more):
    return subprocess.run(
        ["bash", *words], env=given[1] | more, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def stopped(given, part, *words, how=signal.SIGTERM, **more):
    """The same, told to stop as soon as a part is under way."""
    command = subprocess.Popen(
        ["bash", *words], env=given[1] | more | {"SLOW": part}, cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    waiting = given[0] / "log" / "waiting"
    for _ in range(1500):
        if waiting.exists() or command.poll() is not None:
            break
        time.sleep(0.1)
    command.send_signal(how)
    out, err = command.communicate(timeout=120)
    waiting.unlink()
    return subprocess.CompletedProcess(words, command.returncode, out, err)


def log(given, name):
    path = given[0] / "log" / name
    return path.read_text().splitlines() if path.exists() else []


def alive(given):
    """Servers and sandboxes that still run a moment later; who was killed may wait to be reaped."""
    left = log(given, "pids")
    for _ in range(50):
        left = [pid for pid in left if state(pid) not in ("", "Z")]
        if not left:
            break
        time.sleep(0.1)
    return left


def state(pid):
    try:
        return pathlib.Path("/proc", pid, "stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


@pytest.mark.slow
def test_one_job_runs_every_part_with_the_processes_that_it_needs(cluster):
    done = run(cluster, *SLURM)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^recipe: (\S+)$", done.stdout, re.MULTILINE) == PARTS
    assert done.stdout.endswith(f"the table of {cluster[0]}/runs\n")
    started = [line.split() for line in log(cluster, "started")]
    alone = [[part, "1", "cpu"] for part in PARTS if part.startswith(("eval", "curate", "export"))]
    meshes = [[part, "2", "gpu"] for part in ("sft", "stage1", "stage2", "stage3")]
    assert sorted(started) == sorted(alone + meshes)  # the stub of srun runs one task whatever the nodes
    with_servers = [part for part in PARTS if part not in ("sft", "export")]
    assert len(log(cluster, "servers")) == 8 * len(with_servers)
    assert "-m sglang.launch_server --context-length 99 --port 30000" in log(cluster, "servers")[:8]
    roles = [line.split()[0] for line in log(cluster, "sandbox")]
    assert set(roles) == {"master", "worker"} and len(roles) <= 2 * len(with_servers)
    assert alive(cluster) == []
    assert not any((cluster[0] / "runs" / "recipe" / part / "rollout-%N.log").exists() for part in ("sft", "export"))


@pytest.mark.slow
def test_a_job_that_is_stopped_in_a_stage_goes_back_into_the_queue_and_goes_on_there(cluster):
    first = stopped(cluster, "stage2", *SLURM)
    assert first.returncode == 75, first.stderr
    assert "stage2 was stopped; the same command goes on" in first.stderr
    assert log(cluster, "scontrol") == ["requeue 7"]
    assert alive(cluster) == []
    before = log(cluster, "started")
    assert [line.split()[0] for line in before] == PARTS[: PARTS.index("stage2") + 1]
    second = run(cluster, *SLURM)
    assert second.returncode == 0, second.stderr
    assert re.findall(r"^recipe: (\S+) is finished$", second.stdout, re.MULTILINE) == PARTS[: PARTS.index("stage2")]
    assert [line.split()[0] for line in log(cluster, "started")[len(before) :]] == PARTS[PARTS.index("stage2") :]
    third = run(cluster, *SLURM)
    assert third.returncode == 0 and len(re.findall("is finished", third.stdout)) == len(PARTS)


def test_a_part_that_cannot_save_is_stopped_as_well_and_a_cancelled_job_stays_out_of_the_queue(cluster):
    done = stopped(cluster, "sft", *SLURM, SETS="", LAST_SETS="", STOPS_WITH="143", STATE="COMPLETING")
    assert done.returncode == 75 and "sft was stopped" in done.stderr
    assert log(cluster, "scontrol") == []


@pytest.mark.parametrize("code", ["1", "2"])
def test_a_part_that_fails_ends_the_job_with_its_exit_code_and_nothing_follows(cluster, code):
    done = run(cluster, *SLURM, SETS="", LAST_SETS="", FAILS="stage1", WITH=code)
    assert done.returncode == int(code) and f"stage1 FAILED with exit code {code}" in done.stderr
    assert [line.split()[0] for line in log(cluster, "started")] == ["sft", "stage1"]
    assert log(cluster, "scontrol") == [] and alive(cluster) == []


def test_servers_that_do_not_come_end_the_part_instead_of_waiting_for_ever(cluster):
    (cluster[0] / "bin" / "curl").write_text("#!/bin/sh\nexit 7\n")
    done = run(cluster, *SLURM, SETS="aime24", SERVERS_WITHIN_S="1")
    assert done.returncode == 1 and "no server at http://n0:30000" in done.stderr
    assert log(cluster, "started") == [] and alive(cluster) == []


def test_a_mesh_of_other_nodes_than_the_allocation_s_is_refused(cluster):
    (cluster[0] / "bin" / "scontrol").write_text("#!/bin/sh\nprintf 'n0\\nn1\\nn2\\n'\n")
    done = run(cluster, *SLURM, SETS="")
    assert done.returncode == 2 and "the mesh of sft.gin with mi300x_64 has 2 nodes, this allocation 3" in done.stderr


def test_without_a_cluster_the_same_parts_run_one_after_another_and_a_finished_one_is_not_started_again(cluster):
    more = {"SETS": "aime24", "LAST_SETS": ""}
    for name, text in (("servers=16", "servers=0"), ("processes=2", "processes=1")):
        path = cluster[0] / "bin" / "python"
        path.write_text(path.read_text().replace(name, text))
    first = stopped(cluster, "curate", *HERE, how=signal.SIGINT, **more)
    assert first.returncode == 75, first.stderr
    assert log(cluster, "started")[-1] == "curate 1 gpu"
    second = run(cluster, *HERE, **more)
    assert second.returncode == 0 and "recipe: stage2 is finished" in second.stdout
    assert log(cluster, "started")[-1] == "export 1 cpu"
    assert len(log(cluster, "started")) == 12  # curate was begun twice
    (cluster[0] / "runs" / "eval_sft_aime24" / "evaluation.json").unlink()
    third = run(cluster, *HERE, **more)
    assert third.returncode == 0 and log(cluster, "started")[-1] == "eval_sft_aime24 1 gpu"
    fourth = run(cluster, *HERE, "--steps=7", **more)
    assert fourth.returncode == 0 and "is finished" not in fourth.stdout  # other flags are another run


def test_the_same_job_makes_the_training_problems_before(cluster):
    done = run(cluster, "launch/slurm/recipe.sh", "data", "qwen3_32b", SLURM_JOB_ID="8")
    runs = cluster[0] / "runs"
    sets = ("openmath_reasoning", "dapo_17k", "project_euler")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^data: (\S+)$", done.stdout, re.MULTILINE) == list(sets)
    assert done.stdout.endswith(f"joined {' '.join(str(runs / name) for name in sets)}\n")
    asked = (runs / "openmath_reasoning" / "train.jsonl").read_text()
    assert "--gin_file=model/qwen3_32b.gin" in asked and "--gin_file=data/raw_labels.gin" in asked
    assert "Run.init_from=%MODEL_FOLDER" in asked
    assert "--gin_file=data/raw_text.gin" in (runs / "dapo_17k" / "train.jsonl").read_text()


def test_several_nodes_are_refused_where_there_is_one_process(cluster):
    done = run(cluster, "launch/recipe.sh", "qwen3_14b", "mi300x_64")
    assert done.returncode == 2 and "mi300x_64 has 2 nodes" in done.stderr and "launch/slurm/recipe.sh" in done.stderr
    assert log(cluster, "started") == []
