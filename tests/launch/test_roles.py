"""The processes of a run: one on a box, and every role of the cluster with a command line that its own parser takes."""

from __future__ import annotations

import pytest

from rstar2_jax import launch, roles, settings

CLUSTER = ["--gin_file=stage1.gin", "--gin_file=scale/mi300x_64.gin"]
REDIS = "--gin_bindings=Sandbox.redis_url='redis://head:6380'"


def test_the_cluster_has_every_role_with_its_count_and_place(monkeypatch, capsys):
    monkeypatch.setattr(launch.run_record, "plan_lines", lambda arguments, environment: [])
    assert launch.main(["launch", *CLUSTER, REDIS, "--dry_run"]) == 0
    text = capsys.readouterr().out
    assert "sandbox master x 1, on head\n    python -m rstar2_sandbox master --port 6380" in text
    assert "RSTAR2_SANDBOX_REDIS_URL=redis://head:6380 python -m rstar2_sandbox worker --slots CORES" in text
    assert "rollout x 64, on 8 hosts, 1 GPUs each" in text
    assert (
        "--model-path models/Qwen3-14B-Base --load-format dummy --dtype bfloat16 --tp-size 1 --context-length 10241"
        in text
    )
    # A server refuses weights of another dtype than it computes with; what a run publishes for servers is this.
    assert settings.Fleet(engines=("http://a:1",)).published_dtype("bfloat16") == "bfloat16"
    assert settings.Fleet(replicas=2).published_dtype("bfloat16") == "float32"
    assert "--port 30000..30007" in text
    assert "trainer x 8, one on each node of its mesh" in text
    assert "JAX_COORDINATOR_ADDRESS=NODE_0:8476 JAX_NUM_PROCESSES=8 JAX_PROCESS_ID=0..7" in text
    assert "python -m rstar2_jax.launch --gin_file=stage1.gin --gin_file=scale/mi300x_64.gin" in text
    assert "--dry_run" not in text.split("roles:")[1]


def test_a_box_is_one_process_that_starts_what_it_needs(monkeypatch, capsys):
    monkeypatch.setattr(launch.run_record, "plan_lines", lambda arguments, environment: [])
    files = ["--gin_file=stage1.gin", "--gin_file=model/box.gin", "--gin_file=scale/box.gin"]
    assert launch.main(["launch", *files, "--dry_run"]) == 0
    text = capsys.readouterr().out.split("roles:")[1]
    assert "started by the trainer" in text and "one embedded engine" in text and "trainer x 1" in text
    assert "COORDINATOR" not in text and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in text


def test_a_run_without_engine_or_tools_is_its_own_command_alone():
    *head, trainer = roles.lines({"run": None}, ["--gin_file=sft.gin", "--dry_run"])
    assert head == ["", "roles:"]
    assert trainer == "  trainer x 1, one on each node of its mesh\n    python -m rstar2_jax.launch --gin_file=sft.gin"


def facts(capsys, *files, flags=()):
    words = ["launch", *(f"--gin_file={name}" for name in files), *flags, "--roles"]
    assert launch.main(words) == 0
    return dict(line.split("=", 1) for line in capsys.readouterr().out.splitlines())


def test_a_shell_is_told_which_processes_a_run_has(capsys):
    stage = facts(capsys, "stage3.gin", "scale/mi300x_64.gin", flags=[REDIS])
    assert stage.pop("SERVER_FLAGS").startswith(
        "'--model-path models/Qwen3-14B-Base --load-format dummy --dtype bfloat16 "
    )
    assert stage == {"PROCESSES": "8", "PLATFORM": "''", "MEMORY_SHARE": "0.45", "SERVERS": "64", "SANDBOX": "1"}
    tuned = facts(capsys, "sft.gin", "scale/mi300x_64.gin")
    assert (tuned["PROCESSES"], tuned["SERVERS"], tuned["SANDBOX"], tuned["PLATFORM"]) == ("8", "0", "0", "''")
    asked = facts(capsys, "eval.gin", "scale/mi300x_64.gin", flags=[REDIS])
    assert (asked["PROCESSES"], asked["SERVERS"], asked["SANDBOX"], asked["PLATFORM"]) == ("1", "64", "1", "cpu")
    assert "--context-length 32769" in asked["SERVER_FLAGS"]
    box = facts(capsys, "eval.gin", "model/box.gin", "scale/box.gin")
    assert (box["SERVERS"], box["SANDBOX"], box["PLATFORM"]) == ("0", "1", "''")


def test_curation_by_text_alone_has_one_process_and_nothing_beside_it(capsys):
    sets = ("curate.gin", "scale/mi300x_64.gin", "data/dapo_17k.gin", "data/raw_text.gin")
    found = facts(capsys, *sets, flags=[REDIS])
    assert (found["PROCESSES"], found["SERVERS"], found["SANDBOX"], found["PLATFORM"]) == ("1", "0", "0", "cpu")


def test_a_run_that_only_hands_weights_on_keeps_them_off_the_devices(monkeypatch, capsys):
    monkeypatch.setattr(launch.run_record, "plan_lines", lambda arguments, environment: [])
    assert launch.main(["launch", "--gin_file=eval.gin", "--gin_file=scale/mi300x_8.gin", "--dry_run"]) == 0
    text = capsys.readouterr().out.split("roles:")[1]
    assert "JAX_PLATFORMS=cpu python -m rstar2_jax.launch --gin_file=eval.gin" in text and "MEM_FRACTION" not in text


def test_a_range_in_brackets_stands_for_all_of_it():
    fleet = settings.Fleet(engines=("http://n[08-10]:[1-2]", "http://other:5"))
    assert fleet.addresses == (
        "http://n08:1",
        "http://n08:2",
        "http://n09:1",
        "http://n09:2",
        "http://n10:1",
        "http://n10:2",
        "http://other:5",
    )


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        (("http://a[3-1]:1",), r"the range \[3-1\] is empty"),
        (("http://a[1-2]:1", "http://a2:1"), "names an address twice"),
        (("http://a[1-99999999]:1",), "of more than 10000 addresses"),
        (("a:1",), "'a:1' must be http://host:port, beginning with http://"),
        ((" http://a:1",), "without spaces"),
        (("http://a:notaport",), "'http://a:notaport' must be .* the port is 'notaport', and must be a number from 1"),
        (("http://a:",), "the port is ''"),
        (("http://a:70000",), "the port is '70000'"),
        (("http://a:0",), "the port is '0'"),
        (("http://a:1/",), "and no more: take away what follows the port"),
        (("http://a:1/v1",), "and no more"),
        (("http://me@a:1",), "or precedes the host"),
        (("http://",), "the host is ''"),
        (("http://:1",), "the host is ''"),
        (("http://a[1-]:1",), r"the host is 'a\[1-\]'; a range in it is two numbers, as in node\[01-08\]"),
        (("http://a[01-08:1",), "the host is"),
        (("http://a[x-y]:1",), "the host is"),
        (("http://a:[1-x]",), "the host is|the port is"),
        (("http://a b:1",), "the host is 'a b'"),
    ],
)
def test_addresses_that_cannot_be_meant_are_refused(engines, words):
    with pytest.raises(ValueError, match=words):
        settings.Fleet(engines=engines)


def test_addresses_of_every_usual_kind_are_taken():
    kinds = ("http://10.0.0.7:30000", "https://gpu-3.cluster.example:443", "http://[::1]:30000", "http://gateway")
    assert settings.Fleet(engines=kinds).addresses == kinds


def test_addresses_and_processes_of_our_own_exclude_each_other():
    with pytest.raises(ValueError, match="must be 0 where addresses of engines are given"):
        settings.Fleet(engines=("http://a:1",), replicas=2)


@pytest.mark.parametrize("share", [-0.01, 1.5, float("nan")])
def test_a_share_of_moves_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=r"Fleet.move_share = .*must be a share from 0 \(never\) to 1"):
        settings.Fleet(move_share=share)
