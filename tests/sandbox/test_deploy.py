"""The files for clusters name options that exist; each Redis user can do its role's work and no other's."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import redis.exceptions

from rstar2_sandbox import __main__ as command_line
from rstar2_sandbox import client, connection, keys, master, metrics, top
from rstar2_sandbox.protocol import Execution, Status

FOLDER = pathlib.Path(__file__).parents[2] / "sandbox" / "deploy"
ACL = (FOLDER / "redis-users.acl").read_text(encoding="utf-8")


def test_every_command_of_the_files_is_one_that_exists():
    found = re.findall(r"args: \[([^\]]+)\]", (FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
    found += re.findall(r"-m, (rstar2_sandbox, [^\]]+)\]", (FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
    assert len(found) >= 6
    for line in found:
        words = [word.strip().strip('"') for word in line.replace("rstar2_sandbox,", "").split(",")]
        words = ["namespaces" if word == "$(MIN_ISOLATION)" else word for word in words]
        assert callable(command_line._parser().parse_args(words).role), words
    script = (FOLDER / "slurm.sh").read_text(encoding="utf-8")
    for line in re.findall(r"-m rstar2_sandbox ([^|&\n]+)", script):
        words = [re.sub(r"\$\{?\w+\}?|\$\(\w+\)|\\\$\(hostname\)", "1", word.strip('"')) for word in line.split()]
        assert callable(command_line._parser().parse_args(words).role), words
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sh")], check=True)


def test_the_yaml_can_be_read_and_drops_what_it_says_it_drops():
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")))
    kinds = [document["kind"] for document in documents]
    assert {"StatefulSet", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "Secret"} <= set(kinds)
    for document in documents:
        pod = document.get("spec", {}).get("template", {}).get("spec") if document["kind"] != "Service" else None
        for container in (pod or {}).get("containers", []):
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]
            assert pod["automountServiceAccountToken"] is False


@pytest.fixture(scope="module")
def users(tmp_path_factory):
    """Addresses for each user of a Redis that runs with the file of users, and a node that serves there."""
    folder = tmp_path_factory.mktemp("acl")
    server = master.start_redis(master.redis_config(str(folder), "", users=str(FOLDER / "redis-users.acl")))
    secrets = dict(re.findall(r"^user (\w+) on >(\S+)", ACL, re.MULTILINE))
    urls = {name: f"unix://{name}:{secret}@{folder}/redis.sock" for name, secret in secrets.items()}
    node = subprocess.Popen(
        [sys.executable, "-m", "rstar2_sandbox", "worker", "--slots", "1", "--name", "acl-node"],
        env=os.environ | {"RSTAR2_SANDBOX_REDIS_URL": urls["node"]},
        stdout=subprocess.PIPE,
    )
    try:
        assert "tier" in json.loads(node.stdout.readline())
        yield urls
    finally:
        node.terminate()
        node.wait(20)
        node.stdout.close()
        server.kill()
        server.wait()


def test_each_user_can_do_the_work_of_its_role(users):
    async def scene():
        async with client.Client(users["client"], run="acl") as caller:
            first = await caller.execute(Execution(code="print(1)"))
            cell = await caller.execute(Execution(code="1 + 1", session="s"))
            await caller.end_session("s")
            graded = await caller.verify(text=r"<answer>\boxed{7}</answer>", gold="7")
            await caller.advance_epoch()
            again = await caller.execute(Execution(code="print(2)"))
        await asyncio.sleep(1.2)
        watcher = connection.connect(users["watcher"])
        cluster = await metrics.look(watcher)
        await watcher.aclose()
        reaper = connection.connect(users["master"])
        await master.Reaper(reaper, "m").reap()
        await reaper.aclose()
        return first, cell, graded, again, cluster, await top.probe(users["watcher"], "acl-node")

    first, cell, graded, again, cluster, code = asyncio.run(scene())
    assert (first.stdout, cell.stdout, graded.verdict, again.stdout) == ("1\n", "2\n", "correct", "2\n")
    assert first.status is Status.OK and len(cluster.nodes) == 1 and code == 0


def test_no_user_can_do_what_is_not_its_work(users):
    async def refused(name, *command):
        server = connection.connect(users[name])
        try:
            with pytest.raises(redis.exceptions.ResponseError, match="(?i)permission|no permissions"):
                await server.execute_command(*command)
        finally:
            await server.aclose()

    async def scene():
        for name in ("client", "http", "watcher", "node"):
            for command in (("CONFIG", "GET", "*"), ("FLUSHALL",), ("ACL", "LIST"), ("GET", "other"), ("KEYS", "*")):
                await refused(name, *command)
        stream = keys.stream(keys.EXECUTE, "acl")
        for name in ("client", "http"):
            await refused(name, "XACK", stream, keys.GROUP, "1-1")
            await refused(name, "XRANGE", stream, "-", "+")
            await refused(name, "EVAL", "return 1", "0")
            await refused(name, "DEL", stream)
        await refused("watcher", "SET", "rstar2:x", "1")
        with contextlib.suppress(*connection.LOST):
            server = connection.connect(users["client"].replace("SECRET-OF-THE-CLIENTS", "wrong"))
            await server.get("rstar2:x")
            pytest.fail("a wrong secret opened the door")

    asyncio.run(scene())


def test_the_probe_tells_a_node_that_is_there_from_one_that_is_not(users, capsys):
    assert asyncio.run(top.probe(users["watcher"], "nobody")) == 1
    assert "nobody has not reported" in capsys.readouterr().out
