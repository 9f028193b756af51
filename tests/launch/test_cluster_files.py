"""The files that start a cluster: the Slurm script's command lines and the Kubernetes objects, read by our parsers."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

import pytest
import yaml

from rstar2_jax import gin_strict, launch, roles

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
SRUN = """#!/usr/bin/env bash
words=("$@")
while [[ $1 == --* ]]; do shift; done
case "$*" in *"while true"*|*" master "*) printf '%s\\n' "$*" >>"$LOG.roles"; exit 0;; esac
echo "${words[*]}" >"$LOG.srun"
SLURM_NODEID=1 exec "$@"
"""
PYTHON = """#!/usr/bin/env bash
if [ "${@: -1}" = --roles ]; then exec REAL "$@"; fi
exec REAL -c 'import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ["LOG"], "w"))' "$@"
"""


def stub(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def started(tmp_path, *arguments, **more):
    """(argv, environment) of the trainer that the script starts on eight nodes, and the other roles' command lines."""
    stub(tmp_path / "bin", "srun", SRUN)
    stub(tmp_path / "bin", "scontrol", "#!/bin/sh\nprintf 'n%d\\n' 0 1 2 3 4 5 6 7\n")
    stub(tmp_path / "bin", "curl", "#!/bin/sh\nexit 0\n")
    stub(tmp_path / "venv" / "bin", "python", PYTHON.replace("REAL", sys.executable))
    (tmp_path / "log.roles").touch()
    environment = {
        "PYTHONPATH": os.pathsep.join([str(LAUNCH.parent), str(LAUNCH.parent / "sandbox")]),
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "VENV": str(tmp_path / "venv"),
        "SGLANG_PYTHON": "/opt/sglang/python",
        "MODEL_FOLDER": "/models/qwen",
        "RUN_DIR": str(tmp_path / "run"),
        "SLURM_JOB_NODELIST": "n[0-7]",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_ON_NODE": "128",
        **more,
    }
    script = ["bash", str(LAUNCH / "slurm" / "train.sh"), *arguments]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    argv, seen = json.loads((tmp_path / "log").read_text())
    return argv, seen, (tmp_path / "log.roles").read_text()


def resolved(argv):
    """The settings that the trainer would run with."""
    parsed = launch.parse_flags(["launch", *argv])
    result = gin_strict.resolve(parsed.gin_file, launch.shadow_bindings(parsed))
    return gin_strict.build(result)[1]


def servers_of(others):
    """Flags of the SGLang servers, as the shell takes them."""
    return others.partition("sglang.launch_server ")[2].partition("\\")[0]


@pytest.mark.slow
def test_slurm_starts_a_trainer_whose_engines_are_the_servers_that_it_started(tmp_path):
    argv, environment, others = started(tmp_path, "stage1.gin", "--gin_bindings=Run.init_from='a b/sft'")
    assert argv[:2] == ["-m", "rstar2_jax.launch"]
    found = resolved(argv[2:])
    assert found["run"].init_from == "a b/sft" and found["task"].tokenizer == "/models/qwen"
    assert found["rollout"].fleet.addresses == tuple(f"http://n{n}:{30000 + i}" for n in range(8) for i in range(8))
    assert found["sandbox"].redis_url.startswith("redis://:") and found["sandbox"].redis_url.endswith("@n0:6379")
    assert environment["JAX_COORDINATOR_ADDRESS"] == "n0:8476"
    assert (environment["JAX_NUM_PROCESSES"], environment["JAX_PROCESS_ID"]) == ("8", "1")
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.45" and "JAX_PLATFORMS" not in environment
    assert "rstar2_sandbox master --bind n0" in others and "rstar2_sandbox worker" in others
    assert "--model-path /models/qwen" in others and "--tp-size 1" in others
    assert "--context-length 10241" in servers_of(others)
    secret = found["sandbox"].redis_url
    assert not any(secret in word for word in argv)  # a command line is read by every user of the node
    assert (tmp_path / "run" / "scale" / "cluster.gin").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_slurm_uses_a_sandbox_that_runs_already_and_servers_over_several_gpus(tmp_path):
    more = {"SANDBOX_URL": "redis://elsewhere:1", "TENSOR_PARALLEL": "4"}
    argv, _, others = started(tmp_path, "stage2.gin", **more)
    found = resolved(argv[2:])
    assert found["sandbox"].redis_url == "redis://elsewhere:1"
    assert found["rollout"].fleet.tensor_parallel == 4
    assert found["rollout"].fleet.addresses == tuple(f"http://n{n}:{30000 + i}" for n in range(8) for i in range(2))
    assert "rstar2_sandbox" not in others and "--tp-size 4" in servers_of(others)


@pytest.mark.slow
def test_slurm_starts_neither_servers_nor_sandbox_for_fine_tuning(tmp_path):
    argv, environment, others = started(tmp_path, "sft.gin", "--workdir=runs/sft")
    assert others == "" and resolved(argv[2:])["learner"].mesh == (1, 64, 1)
    assert environment["JAX_NUM_PROCESSES"] == "8" and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment


@pytest.mark.slow
@pytest.mark.parametrize("file", ["eval.gin", "curate.gin", "export.gin"])
def test_slurm_runs_one_process_on_host_memory_where_nothing_is_trained(tmp_path, file):
    argv, environment, others = started(tmp_path, file, "--gin_bindings=Run.seed=3")
    assert environment["JAX_PLATFORMS"] == "cpu" and "JAX_COORDINATOR_ADDRESS" not in environment
    assert "--nodes=1 --ntasks=1 --nodelist=n0" in (tmp_path / "log.srun").read_text()
    found = resolved(argv[2:])
    if file == "export.gin":
        assert others == ""
        return
    assert len(found["rollout"].fleet.addresses) == 64 and "rstar2_sandbox worker" in others
    context = found["rollout"].max_prompt_tokens + found["rollout"].max_response_tokens + 1
    assert f"--context-length {context}" in servers_of(others)


def kubernetes():
    objects = list(yaml.safe_load_all((LAUNCH / "k8s" / "train.yaml").read_text()))
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def shown(script, environment, name):
    """Words of the command that a container's script would start, with a stub for its program."""
    environment = {"PATH": f"{environment['BIN']}{os.pathsep}{os.environ['PATH']}", **environment}
    stub(pathlib.Path(environment["BIN"]), name, "#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    done = subprocess.run(["bash", "-c", script], env=environment, text=True, capture_output=True, check=True)
    return done.stdout.splitlines()


def test_the_kubernetes_trainer_has_a_command_line_that_is_understood_and_reaches_the_pods_that_are_there(tmp_path):
    by_name = kubernetes()
    servers, trainer = by_name["StatefulSet", "rollout"]["spec"], by_name["Job", "trainer"]["spec"]
    given = by_name["ConfigMap", "run"]["data"]
    (container,) = trainer["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": "run"}}]
    script = container["args"][0].replace("/tmp/", f"{tmp_path}/")
    more = {"SANDBOX_URL": "redis://s", "JOB_COMPLETION_INDEX": "3", "BIN": str(tmp_path / "bin")}
    line = shown(script, given | more, "python")
    assert line[:2] == ["-m", "rstar2_jax.launch"]
    found = resolved(line[2:])
    hosts = {address.rpartition(":")[0] for address in found["rollout"].fleet.addresses}
    assert hosts == {f"http://rollout-{n}.rollout" for n in range(servers["replicas"])}
    assert found["sandbox"].redis_url == "redis://s" and found["run"].init_from == "/shared/runs/sft"
    assert trainer["completions"] == 8 and servers["serviceName"] == "rollout"
    assert given["JAX_NUM_PROCESSES"] == "8" and given["JAX_COORDINATOR_ADDRESS"] == "trainer-0.trainer:8476"
    facts = dict(fact.split("=", 1) for fact in roles.facts(found))
    assert shlex.split(facts["SERVER_FLAGS"]) == [given["SERVER_FLAGS"].strip()]
    assert facts["PROCESSES"] == given["JAX_NUM_PROCESSES"]
    assert facts["MEMORY_SHARE"] == given["XLA_PYTHON_CLIENT_MEM_FRACTION"]


KUBECTL = """#!/usr/bin/env bash
shift  # the namespace
case "$1 $2" in
    "create configmap") printf '%s\n' "${@:4}" >"$LOG/configmap" ;;
    "apply -l") cat >"$LOG/$3.yaml" ;;
    "get job/trainer") cat "$LOG/ended" 2>/dev/null || echo "" ;;
    "get pods") echo "${CODES:-}" ;;
esac
echo "$*" >>"$LOG/kubectl"
"""


def on_kubernetes(tmp_path, *words, **more):
    stub(tmp_path / "bin", "kubectl", KUBECTL)
    stub(tmp_path / "bin", "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    environment = {
        "PYTHONPATH": os.pathsep.join([str(LAUNCH.parent), str(LAUNCH.parent / "sandbox")]),
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "VENV": str(tmp_path),
        "LOG": str(tmp_path),
        "LOOK_EVERY_S": "0.1",
        **more,
    }
    command = ["bash", str(LAUNCH / "k8s" / "run.sh"), *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_kubernetes_runs_an_evaluation_as_one_pod_beside_the_servers_with_room_for_its_answers(tmp_path):
    (tmp_path / "ended").write_text("SuccessCriteriaMet Complete")
    start = "--gin_bindings=Run.init_from='/shared/a b'"
    done = on_kubernetes(tmp_path, "eval.gin", "--workdir=/shared/runs/eval", start)
    _, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    lines = (tmp_path / "configmap").read_text().splitlines()
    given = dict(line.removeprefix("--from-literal=").split("=", 1) for line in lines)
    assert given["FILE"] == "eval.gin" and "--context-length 32769" in given["SERVER_FLAGS"]
    assert given["JAX_PLATFORMS"] == "cpu" and "JAX_NUM_PROCESSES" not in given
    job = yaml.safe_load_all((tmp_path / "app=trainer.yaml").read_text())
    (spec,) = [each["spec"] for each in job if each["kind"] == "Job"]
    assert (spec["completions"], spec["parallelism"]) == (1, 1)
    script = spec["template"]["spec"]["containers"][0]["args"][0].replace("/tmp/", f"{tmp_path}/")
    more = {"SANDBOX_URL": "redis://s", "JOB_COMPLETION_INDEX": "0", "BIN": str(tmp_path / "stubs")}
    found = resolved(shown(script, given | more, "python")[2:])
    assert found["run"].init_from == "/shared/a b" and len(found["rollout"].fleet.addresses) == 64


@pytest.mark.slow
def test_kubernetes_starts_no_servers_for_fine_tuning_and_stops_it_when_it_is_told_to(tmp_path):
    running = on_kubernetes(tmp_path, "sft.gin", "--workdir=/shared/runs/sft")
    for _ in range(1200):
        if "get job/trainer" in ((tmp_path / "kubectl").read_text() if (tmp_path / "kubectl").exists() else ""):
            break
        time.sleep(0.1)
    running.terminate()
    running.communicate(timeout=60)
    assert running.returncode == 75
    assert not (tmp_path / "app=rollout.yaml").exists() and (tmp_path / "app=trainer.yaml").exists()
    assert (tmp_path / "kubectl").read_text().splitlines()[-1].startswith("delete ")


@pytest.mark.slow
def test_kubernetes_tells_a_wrong_configuration_from_a_run_that_failed(tmp_path):
    (tmp_path / "ended").write_text("Failed")
    for codes, wanted in (("1 1", 1), ("2", 2)):
        done = on_kubernetes(tmp_path, "export.gin", CODES=codes)
        done.communicate(timeout=300)
        assert done.returncode == wanted
