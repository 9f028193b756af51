"""The HTTP interface of code-judge in front of the queue: whoever uses that service switches by changing an address.

POST /run, /run/batch, /run/long-batch, /judge, /judge/batch, /judge/long-batch; GET /ping, /status. Requests carry
sub_id, type ("python", or "math": a solution graded against expected_output), solution, input, expected_output.
Answers carry sub_id, success, run_success, cost and reason, those of /run also stdout and stderr.

Deliberately not here: TLS and users (put a proxy before it), and C++.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import time
import uuid
from typing import Any

from rstar2_sandbox import keys
from rstar2_sandbox.client import Client
from rstar2_sandbox.connection import LOST, connect
from rstar2_sandbox.protocol import Execution, Limits, Outcome, Status, Verdict, check_verification

MAX_HEAD_BYTES = 32 * 2**10
MAX_BODY_BYTES = 128 * 2**20
MAX_BATCH = 10_000
IDLE_S = 120.0
_PHRASES = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 411: "Length Required",
    413: "Content Too Large", 422: "Unprocessable Content", 503: "Service Unavailable",
}  # fmt: skip
_REASONS = {
    Status.TIMEOUT_WALL: "worker_timeout",
    Status.TIMEOUT_CPU: "worker_timeout",
    Status.REJECTED: "queue_timeout",
    Status.INFRA: "internal_error",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FrontLimits:
    """Limits of one program, in seconds and bytes; see protocol.Limits."""

    run_s: float = 10.0
    queue_s: float = 15.0
    long_queue_s: float = 3600.0
    memory_bytes: int = 512 * 2**20

    def __post_init__(self) -> None:
        for queue_s in (self.queue_s, self.long_queue_s):
            self.of_program(queue_s)

    def of_program(self, queue_s: float) -> Limits:
        """The same for the sandbox. Raises ValueError naming what is out of its range."""
        return Limits(wall_s=self.run_s, queue_s=queue_s, memory_bytes=self.memory_bytes)


class RefusedError(Exception):
    """A request that is answered with an error: HTTP status and what is wrong."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class Submission:
    """One program, or one answer to grade."""

    sub_id: str
    type: str
    solution: str
    input: str
    expected: str | None


def submission(fields: Any) -> Submission:
    """Read a submission. Raises RefusedError that names the field."""
    if not isinstance(fields, dict):
        raise RefusedError(422, "a submission is a JSON object")
    texts = {}
    for name in ("sub_id", "type", "solution", "input", "expected_output"):
        texts[name] = fields.get(name)
        if texts[name] is not None and not isinstance(texts[name], str):
            raise RefusedError(422, f"{name} must be a string")
    if texts["type"] not in ("python", "math"):
        raise RefusedError(422, "type must be 'python' or 'math'")
    if texts["solution"] is None:
        raise RefusedError(422, "solution is missing")
    sub_id = texts["sub_id"] or str(uuid.uuid4())
    return Submission(sub_id, texts["type"], texts["solution"], texts["input"] or "", texts["expected_output"])


def submissions(body: Any) -> tuple[str, list[Submission]]:
    """Read a batch: its id and its submissions. Raises RefusedError."""
    if not isinstance(body, dict) or not isinstance(body.get("submissions"), list) or not body["submissions"]:
        raise RefusedError(422, "submissions must be a list that is not empty")
    if len(body["submissions"]) > MAX_BATCH:
        raise RefusedError(413, f"at most {MAX_BATCH} submissions in a batch")
    sub_id = body.get("sub_id") or str(uuid.uuid4())
    if not isinstance(sub_id, str):
        raise RefusedError(422, "sub_id must be a string")
    return sub_id, [submission(fields) for fields in body["submissions"]]


def head(block: bytes) -> tuple[str, str, dict[str, str]]:
    """Method, path without its query, and headers (names in lower case) of a request's head. Raises RefusedError."""
    first, *lines = block.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise RefusedError(400, "not a request line")
    headers = {}
    for line in filter(None, lines):
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise RefusedError(400, "not a header line")
        headers[name.lower()] = value.strip()
    if parts[2] == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return parts[0], parts[1].partition("?")[0], headers


def body_bytes(headers: dict[str, str]) -> int:
    """Length of the body that the headers announce. Raises RefusedError."""
    if "transfer-encoding" in headers:
        raise RefusedError(411, "send Content-Length: chunked bodies are not read")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        raise RefusedError(400, "not a Content-Length")
    if int(text) > MAX_BODY_BYTES:
        raise RefusedError(413, f"a body has at most {MAX_BODY_BYTES} bytes")
    return int(text)


class Front:
    """Answers requests by way of one client.

    Args:
        redis_url: address of the cluster's Redis.
        limits: of each program.
    """

    def __init__(self, redis_url: str, limits: FrontLimits) -> None:
        self._limits = limits
        self._redis = connect(redis_url)
        self._client = Client(redis_url, run="http", queue_limit_s=limits.long_queue_s)

    async def close(self) -> None:
        """Close both connections."""
        await self._client.close()
        await self._redis.aclose()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side ends it."""
        try:
            with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
                while await self._one(reader, writer):
                    pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; True when the connection stays."""
        keep, method = False, ""
        try:
            try:
                async with asyncio.timeout(IDLE_S):
                    block = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError as error:
                raise RefusedError(400, "the request's head is too long") from error
            method, path, headers = head(block[:-4])
            size = body_bytes(headers)
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            async with asyncio.timeout(IDLE_S):
                body = await reader.readexactly(size)
            keep = headers.get("connection", "").lower() != "close"
            status, content = 200, await self._answer(method, path, body)
        except RefusedError as error:
            status, content = error.status, {"detail": str(error)}
        payload = json.dumps(content).encode()
        lines = [
            f"HTTP/1.1 {status} {_PHRASES[status]}", "content-type: application/json",
            f"content-length: {len(payload)}", f"connection: {'keep-alive' if keep else 'close'}",
        ]  # fmt: skip
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == "HEAD" else payload))
        await writer.drain()
        return keep

    async def _answer(self, method: str, path: str, body: bytes) -> Any:
        path = path.rstrip("/") or "/"
        if path in ("/ping", "/status"):
            if method not in ("GET", "HEAD"):
                raise RefusedError(405, f"{path} is asked with GET")
            return "pong" if path == "/ping" else await self._status()
        what, _, batch = path.lstrip("/").partition("/")
        if what not in ("run", "judge") or batch not in ("", "batch", "long-batch"):
            raise RefusedError(404, f"there is no {path}")
        if method != "POST":
            raise RefusedError(405, f"{path} is asked with POST")
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError(422, f"the body is not JSON: {error}") from error
        queue_s = self._limits.long_queue_s if batch == "long-batch" else self._limits.queue_s
        sub_id, parts = submissions(content) if batch else ("", [submission(content)])
        # All of them are checked before one is run.
        checked = [(part, self._checked(part, queue_s)) for part in parts]
        try:
            results = await asyncio.gather(*(self._run(*pair, shown=what == "run") for pair in checked))
        except RuntimeError as error:  # the client cannot go on, and says why
            raise RefusedError(503, str(error)) from error
        return {"sub_id": sub_id, "results": results} if batch else results[0]

    async def _status(self) -> dict[str, int]:
        try:
            seconds, _ = await self._redis.time()
            members = await self._redis.zrangebyscore(keys.nodes(), seconds, "+inf")
            waiting = 0
            for lane in keys.LANES:
                for run in await self._redis.smembers(keys.runs(lane)):
                    waiting += await self._redis.xlen(keys.stream(lane, run.decode("utf-8", "replace")))
        except LOST as error:
            raise RefusedError(503, f"no answer from Redis: {error}") from error
        return {"queue": waiting, "num_workers": sum(int(member.rpartition(b"/")[2]) for member in members)}

    def _checked(self, part: Submission, queue_s: float) -> Execution | None:
        """What is to be run; None for an answer to grade. Raises RefusedError."""
        try:
            if part.type == "math":
                check_verification(_text(part), part.expected or "", "")
                return None
            return Execution(code=part.solution, stdin=part.input, limits=self._limits.of_program(queue_s))
        except ValueError as error:
            raise RefusedError(422, str(error)) from error

    async def _run(self, part: Submission, execution: Execution | None, *, shown: bool) -> dict[str, Any]:
        started = time.monotonic()
        if execution is None:
            fields = await self._grade(part)
        else:
            fields = _fields(await self._client.execute(execution), part.expected)
        fields.setdefault("cost", time.monotonic() - started)
        if not shown:
            fields = {name: value for name, value in fields.items() if name not in ("stdout", "stderr")}
        return {"sub_id": part.sub_id} | fields

    async def _grade(self, part: Submission) -> dict[str, Any]:
        found = await self._client.verify(text=_text(part), gold=part.expected or "")
        ours = found.verdict is Verdict.INFRA
        right = found.verdict is Verdict.CORRECT
        reason = "internal_error" if ours else ""
        return {"success": right, "run_success": not ours, "stdout": "", "stderr": "", "reason": reason}


def _text(part: Submission) -> str:
    """An answer to grade, as the grader reads it."""
    boxed = part.solution if r"\boxed" in part.solution else rf"\boxed{{{part.solution}}}"
    return boxed if "</answer>" in boxed else f"<answer>{boxed}</answer>"


def _fields(outcome: Outcome, expected: str | None) -> dict[str, Any]:
    ran = outcome.status is Status.OK
    return {
        "success": ran and (expected is None or outcome.stdout.strip() == expected.strip()),
        "run_success": ran,
        "cost": outcome.run_s,
        "stdout": outcome.stdout,
        "stderr": outcome.stderr or outcome.detail,
        "reason": _REASONS.get(outcome.status, ""),
    }


async def serve(redis_url: str, bind: str, port: int, limits: FrontLimits) -> None:
    """Serve until SIGTERM; the address is printed as a line of JSON. Raises OSError when it cannot be listened on."""
    front = Front(redis_url, limits)
    server = await asyncio.start_server(front.connection, bind, port, limit=MAX_HEAD_BYTES)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(json.dumps({"http": f"http://{bind}:{server.sockets[0].getsockname()[1]}"}), flush=True)
    try:
        await stop.wait()
    finally:
        server.close()
        await front.close()
