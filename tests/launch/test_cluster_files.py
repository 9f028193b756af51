"""The files that start a cluster: the Slurm script's command lines and the Kubernetes objects, read by our parsers."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import yaml

from rstar2_jax import gin_strict, launch

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
case "$*" in *"while true"*|*" master "*) printf '%s\\n' "$*" >>"$LOG.roles"; exit 0;; esac
SLURM_NODEID=1 exec "$@"
"""
PYTHON = """#!/usr/bin/env bash
exec REAL -c 'import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ["LOG"], "w"))' "$@"
"""


def stub(folder, name, text):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def started(tmp_path, *arguments, **more):
    """(argv, environment) of the trainer that the script starts on two nodes, and the other roles' command lines."""
    stub(tmp_path / "bin", "srun", SRUN)
    stub(tmp_path / "bin", "scontrol", "#!/bin/sh\nprintf 'n0\\nn1\\n'\n")
    stub(tmp_path / "bin", "curl", "#!/bin/sh\nexit 0\n")
    stub(tmp_path / "venv" / "bin", "python", PYTHON.replace("REAL", sys.executable))
    environment = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "VENV": str(tmp_path / "venv"),
        "SGLANG_PYTHON": "/opt/sglang/python",
        "MODEL_FOLDER": "/models/qwen",
        "RUN_DIR": str(tmp_path / "run"),
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_ON_NODE": "128",
        **more,
    }
    script = ["bash", str(LAUNCH / "slurm" / "train.sh"), *arguments]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    argv, seen = json.loads((tmp_path / "log").read_text())
    return argv, seen, (tmp_path / "log.roles").read_text()


def resolved(argv):
    """The settings that the trainer would run with."""
    parsed = launch.parse_flags(["launch", *argv])
    result = gin_strict.resolve(parsed.gin_file, launch.shadow_bindings(parsed))
    return gin_strict.build(result)[1]


def test_slurm_starts_a_trainer_whose_engines_are_the_servers_that_it_started(tmp_path):
    argv, environment, others = started(tmp_path, "stage1.gin", "--gin_bindings=Run.init_from='a b/sft'")
    assert argv[:2] == ["-m", "rstar2_jax.launch"]
    found = resolved(argv[2:])
    assert found["run"].init_from == "a b/sft" and found["task"].tokenizer == "/models/qwen"
    assert found["rollout"].fleet.addresses == tuple(f"http://n{n}:{30000 + i}" for n in range(2) for i in range(8))
    assert found["sandbox"].redis_url.startswith("redis://:") and found["sandbox"].redis_url.endswith("@n0:6379")
    assert environment["JAX_COORDINATOR_ADDRESS"] == "n0:8476"
    assert (environment["JAX_NUM_PROCESSES"], environment["JAX_PROCESS_ID"]) == ("2", "1")
    assert "rstar2_sandbox master --bind n0" in others and "rstar2_sandbox worker" in others
    assert "--model-path /models/qwen" in others and "--tp-size 1" in others


def test_slurm_uses_a_sandbox_that_runs_already_and_servers_over_several_gpus(tmp_path):
    more = {"SANDBOX_URL": "redis://elsewhere:1", "TENSOR_PARALLEL": "4"}
    argv, _, others = started(tmp_path, "stage2.gin", **more)
    found = resolved(argv[2:])
    assert found["sandbox"].redis_url == "redis://elsewhere:1"
    assert found["rollout"].fleet.tensor_parallel == 4
    assert found["rollout"].fleet.addresses == tuple(f"http://n{n}:{30000 + i}" for n in range(2) for i in range(2))
    assert "rstar2_sandbox" not in others


def test_the_kubernetes_trainer_has_a_command_line_that_is_understood_and_reaches_the_pods_that_are_there():
    objects = list(yaml.safe_load_all((LAUNCH / "k8s" / "train.yaml").read_text()))
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    servers, trainer = by_name["StatefulSet", "rollout"]["spec"], by_name["Job", "trainer"]["spec"]
    (container,) = trainer["template"]["spec"]["containers"]
    words = container["args"][0].replace("\\\n", " ").replace("$SANDBOX_URL", "redis://s")
    shown = f"set -- {words.partition('exec')[2].strip()}; printf '%s\\n' \"$@\""
    line = subprocess.run(["bash", "-c", shown], text=True, capture_output=True, check=True).stdout.splitlines()
    assert line[:3] == ["python", "-m", "rstar2_jax.launch"]
    hosts = {address.rpartition(":")[0] for address in resolved(line[3:])["rollout"].fleet.addresses}
    assert hosts == {f"http://rollout-{n}.rollout" for n in range(servers["replicas"])}
    assert trainer["completions"] == 8 and servers["serviceName"] == "rollout"
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values["JAX_NUM_PROCESSES"] == "8" and values["JAX_COORDINATOR_ADDRESS"] == "trainer-0.trainer:8476"
