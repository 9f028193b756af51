"""The HTTP front end speaks code-judge's JSON; the metrics and the live view read what nodes report."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar2_sandbox import client, front, metrics, top
from rstar2_sandbox.protocol import Execution


@contextlib.contextmanager
def role(sandbox, monkeypatch, *arguments):
    """A role of the command line as a process of its own; gives the JSON of its first line."""
    monkeypatch.setenv("RSTAR2_SANDBOX_REDIS_URL", sandbox.redis_url)
    process = subprocess.Popen([sys.executable, "-m", "rstar2_sandbox", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15)
        process.stdout.close()


@pytest.fixture(scope="module")
def address(sandbox):
    with (
        pytest.MonkeyPatch.context() as patch,
        role(sandbox, patch, "http", "--port", "0", "--run_limit_s", "1") as found,
    ):
        yield found["http"]


def ask(address, path, body=None, method=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data=data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_it_answers_as_code_judge_does(address):
    assert ask(address, "/ping") == (200, "pong")
    status, found = ask(address, "/status")
    assert status == 200 and found["num_workers"] == 2 and set(found) == {"queue", "num_workers"}
    body = {"type": "python", "solution": "print(input())", "input": "9", "expected_output": "9", "sub_id": "s"}
    status, run = ask(address, "/run", body)
    assert status == 200
    assert set(run) == {"sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"}
    assert run | {"cost": 0} == {
        "sub_id": "s", "success": True, "run_success": True, "cost": 0, "stdout": "9\n", "stderr": "", "reason": "",
    }  # fmt: skip
    _, judged = ask(address, "/judge", body | {"expected_output": "8"})
    assert judged | {"cost": 0} == {"sub_id": "s", "success": False, "run_success": True, "cost": 0, "reason": ""}


@pytest.mark.parametrize("path", ["/run/batch", "/run/long-batch", "/judge/batch", "/judge/long-batch"])
def test_batches_keep_their_order_and_time_outs_their_reason(address, path):
    programs = [f"print({n})" for n in range(6)] + ["while True: pass", "1/0"]
    status, found = ask(
        address, path, {"type": "batch", "submissions": [{"type": "python", "solution": p} for p in programs]}
    )
    assert status == 200 and found["sub_id"]
    results = found["results"]
    assert [result["success"] for result in results] == [True] * 6 + [False] * 2
    assert [result["reason"] for result in results] == [""] * 6 + ["worker_timeout", ""]
    if path.startswith("/run"):
        assert [result["stdout"] for result in results[:6]] == [f"{n}\n" for n in range(6)]
        assert "ZeroDivisionError" in results[7]["stderr"]
    else:
        assert "stdout" not in results[0]


def test_answers_are_graded_too(address):
    def grade(solution, gold):
        return ask(address, "/judge", {"type": "math", "solution": solution, "expected_output": gold})[1]["success"]

    assert grade("1{,}234", "1234") and grade(r"so \boxed{7}", "7") and not grade("8", "7")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/run", {"type": "cpp", "solution": "x"}, 422),
        ("/run", {"type": "python"}, 422),
        ("/run", {"type": "python", "solution": 1}, 422),
        ("/run", [1], 422),
        ("/run/batch", {"submissions": []}, 422),
        ("/run/batch", {"submissions": [7]}, 422),
        ("/run/batch", {"submissions": [{"type": "python", "solution": c} for c in ("1", "x" * 2**21)]}, 422),
        ("/judge", {"type": "math", "solution": "x" * (2**22 + 1), "expected_output": "1"}, 422),
        ("/run", {"type": "python", "solution": "x" * (2**20 + 1)}, 422),
        ("/nothing", {}, 404),
        ("/run/other", {}, 404),
        ("/ping", {}, 405),
        ("/run", None, 405),
    ],
)
def test_what_it_does_not_understand_it_refuses_by_name(address, path, body, status):
    found, answer = ask(address, path, body)
    assert found == status and isinstance(answer["detail"], str)


def test_bytes_that_are_no_request_end_the_connection_and_nothing_else(address):
    host, port = address.removeprefix("http://").split(":")
    for sent in (b"\r\n\r\n", b"GET\r\n\r\n", b"A" * 40_000, b"POST /run HTTP/1.1\r\nContent-Length: x\r\n\r\n",
                 b"POST /run HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"POST /run HTTP/1.1\r\n: x\r\n\r\n",
                 b"POST /run HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n"):  # fmt: skip
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(sent)
            assert re.match(rb"HTTP/1.1 4\d\d ", connection.recv(4096)), sent
    assert ask(address, "/ping") == (200, "pong")


def test_old_clients_and_probes_find_the_end_of_an_answer(address):
    host, port = address.removeprefix("http://").split(":")
    for sent, ends in ((b"GET /ping HTTP/1.0", b'"pong"'), (b"HEAD /ping HTTP/1.0", b"\r\n\r\n")):
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(sent + b"\r\n\r\n")
            received = b"".join(iter(lambda: connection.recv(4096), b""))  # noqa: B023
        assert received.startswith(b"HTTP/1.1 200 ") and received.endswith(ends)


def test_limits_out_of_their_range_are_refused_before_anything_listens():
    with pytest.raises(ValueError, match="wall_s"):
        front.FrontLimits(run_s=0)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=60).map(lambda text: f"POST {text} HTTP/1.1\r\n{text}: 1".encode()))
def test_no_head_of_a_request_crashes(block):
    try:
        front.body_bytes(front.head(block)[2])
    except front.RefusedError as error:
        assert 400 <= error.status < 500


def test_the_numbers_for_prometheus_and_the_live_view(sandbox, monkeypatch):
    async def some_calls():
        async with client.Client(sandbox.redis_url, run="seen") as caller:
            await asyncio.gather(*(caller.execute(Execution(code="print(1)")) for _ in range(5)))
            await asyncio.sleep(1.2)

    asyncio.run(some_calls())
    stop, lines = threading.Event(), []
    monkeypatch.setattr("builtins.print", lambda text, flush=False: lines.append(text))
    thread = threading.Thread(target=metrics.serve, args=(sandbox.redis_url, 0, "127.0.0.1", stop))
    thread.start()
    deadline = time.monotonic() + 10
    while not lines:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with urllib.request.urlopen(json.loads(lines[0])["metrics"], timeout=10) as answer:
        text = answer.read().decode()
    stop.set()
    thread.join()
    for line in (
        "rstar2_sandbox_up 1.0",
        "rstar2_sandbox_nodes 1.0",
        'rstar2_sandbox_queue_age_seconds{lane="execute"}',
    ):
        assert line in text
    counted = re.findall(r'rstar2_sandbox_calls_total\{lane="execute",node="[^"]+",status="ok"\} ([\d.]+)', text)
    assert float(counted[0]) >= 5


def test_the_live_view_shows_each_node_once(sandbox, capsys):
    asyncio.run(top.show(sandbox.redis_url, once=True))
    shown = capsys.readouterr().out
    assert "nodes 1" in shown and "execute/ok" in shown
    assert re.search(r"\d/2 +\d+ +\d/2 ", shown)
