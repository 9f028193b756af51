"""The roles refuse what makes no sense, and a master keeps its Redis."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
import redis

from rstar2_sandbox import __main__ as command_line
from rstar2_sandbox import executor, jail, worker
from rstar2_sandbox.protocol import Execution

PASSWORD = 'a "quoted" secret#'


@pytest.mark.parametrize(
    "line",
    [
        "worker --slots 0",
        "worker --slots many",
        "worker --verify_slots 0",
        "worker --session_slots -1",
        "worker --uid_base -5",
        "http --port 65536",
        "http --run_limit_s 0",
        "http --run_limit_s nan",
        "http --memory_mib 0",
        "master --port 0",
        "master --max_mib -1",
        "bench --seconds 0",
        "bench --burst -1",
        "doctor --queue_calls -1",
        "nothing",
        "",
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(line, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(line.split())
    assert ended.value.code == 2
    assert line.split()[1:2] == [] or line.split()[1] in capsys.readouterr().err


def test_a_node_refuses_counts_that_would_serve_nobody(monkeypatch):
    for fields in ({"slots": 0}, {"slots": 1, "verify_slots": 0}, {"slots": 1, "session_slots": -1}):
        with pytest.raises(ValueError, match="must be"):
            worker.Node("redis://127.0.0.1:1", settings=executor.Settings(), **fields)
    with pytest.raises(ValueError, match="between 1 and"):
        executor.Executor(jail.IDS, executor.Settings())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives slots user ids of their own")
def test_user_ids_that_somebody_has_are_refused_before_anything_of_theirs_is_killed():
    with subprocess.Popen(["sleep", "60"], user=65534) as bystander:
        pool = executor.Executor(1, executor.Settings(uid_base=65533))
        with pytest.raises(ValueError, match="nobody"):
            asyncio.run(pool.start())
        pool.close()
        assert bystander.poll() is None
        bystander.kill()


def test_many_slots_get_the_descriptors_that_they_need():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1024:
        pytest.skip("this machine allows few open files")

    async def scene():
        pool = executor.Executor(24, executor.Settings())
        try:
            await pool.start()
            return await asyncio.gather(*(slot.run(Execution(code="print(1)")) for slot in pool.slots))
        finally:
            pool.close()

    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        assert {outcome.stdout for outcome in asyncio.run(scene())} == {"1\n"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.e2e
def test_a_master_keeps_its_redis_and_takes_it_along_when_it_ends(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    master = start_master(port, tmp_path / "with a blank")
    try:
        with redis.Redis(port=port, password=PASSWORD) as server:
            first = pid_of(server)
            os.kill(first, signal.SIGKILL)
            second = pid_of(server, after=first)
            done = start_master(port, tmp_path / "another")
            said = done.communicate(timeout=60)[1]
            assert done.returncode == 1 and "Failed listening" in said, said
            master.terminate()
            assert master.wait(20) == 0
            assert not os.path.exists(f"/proc/{second}")
    finally:
        master.kill()
        master.communicate()


def start_master(port, folder):
    command = [sys.executable, "-m", "rstar2_sandbox", "master", "--port", str(port), "--keep", str(folder)]
    environment = os.environ | {"RSTAR2_SANDBOX_REDIS_PASSWORD": PASSWORD}
    environment.pop("RSTAR2_SANDBOX_REDIS_URL", None)
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def pid_of(server, after=0):
    """Process id of a Redis, once it is another one than `after`."""
    deadline = time.monotonic() + 20
    while True:
        try:
            pid = server.info("server")["process_id"]
            if pid != after:
                return pid
        except redis.exceptions.ConnectionError:
            assert time.monotonic() < deadline, "no Redis came"
        time.sleep(0.02)
