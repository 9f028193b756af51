"""The values that travel between client and node, their limits and their JSON form. Pure: no clock, no I/O.

Deliberately not here: what a call does (jail_child), how it is judged (verify) and any Redis key (keys).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Mapping
from typing import Any

MAX_CODE_BYTES = 2**20
MAX_STDIN_BYTES = 2**20
MAX_TEXT_BYTES = 4 * 2**20
MAX_KEY_CHARS = 200
MAX_OUTPUT_BYTES = 16 * 2**20
BATCH_CALLS = 64
BATCH_BYTES = 2**20
RESULT_TTL_S = 900
INFRA_TTL_S = 10
MAX_DELIVERIES = 3
SUPERSEDED = "superseded by a later epoch of its run"
PYTHON, SQL, OCTAVE = "python", "sql", "octave"
LANGUAGES = (PYTHON, SQL, OCTAVE)
# A result's keeping time shrinks with its size, so that results take no more than this many byte-seconds each.
_KEPT_BYTE_SECONDS = RESULT_TTL_S * 4096
MIN_TTL_S = 60


class Status(enum.StrEnum):
    """What became of one execution. INFRA and REJECTED are ours; every other status but OK is the code's own fault."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT_WALL = "timeout_wall"
    TIMEOUT_CPU = "timeout_cpu"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"
    REJECTED = "rejected"
    INFRA = "infra"


class Verdict(enum.StrEnum):
    """What grading said. INFRA is a fault of ours and never a reward."""

    CORRECT = "correct"
    WRONG = "wrong"
    INFRA = "infra"


class ProtocolError(ValueError):
    """A message that cannot be read: it is answered, never obeyed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one execution may use.

    Args:
        wall_s: seconds from the moment it starts to run.
        queue_s: seconds it may wait before it starts.
        cpu_s: CPU seconds of one process; 0 means the wall limit rounded up, plus one.
        memory_bytes: address space on top of the warm interpreter's.
        output_bytes: kept of stdout and of stderr, head and tail; the rest is counted.
        file_bytes: size of one file written.
        processes: processes and threads at once.
    """

    wall_s: float = 5.0
    queue_s: float = 120.0
    cpu_s: int = 0
    memory_bytes: int = 512 * 2**20
    output_bytes: int = 64 * 2**10
    file_bytes: int = 64 * 2**20
    processes: int = 32

    def __post_init__(self) -> None:
        for field in ("wall_s", "queue_s", "memory_bytes", "output_bytes", "file_bytes", "processes"):
            if not 0 < getattr(self, field) < 2**53:
                raise ValueError(f"Limits.{field} = {getattr(self, field)!r}: must be above 0 and below 2**53")
        if self.output_bytes > MAX_OUTPUT_BYTES:
            raise ValueError(f"Limits.output_bytes = {self.output_bytes!r}: at most {MAX_OUTPUT_BYTES} fit a result")
        if not 0 <= self.cpu_s < 2**31:
            raise ValueError(f"Limits.cpu_s = {self.cpu_s!r}: must be 0 (derived from wall_s) or a count of seconds")

    @property
    def effective_cpu_s(self) -> int:
        """CPU seconds that the kernel enforces."""
        return self.cpu_s or int(self.wall_s) + 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """One program to run.

    Args:
        code: source text.
        language: one of LANGUAGES: Python; SQL on an SQLite database in memory; Octave where a node has it.
        session: name, inside the run, of the stateful Python session that the code is a cell of; empty: it runs alone.
            The limits of the session's first cell, but for the wall clock's, hold for all of them.
        stdin: text given on standard input; empty means end of file at once.
        key: idempotency key: the same key in the same run is executed once. Empty: a fresh one.
        limits: see Limits.
        deadline_s: seconds that the caller waits altogether; 0 means queue limit plus run limit plus a grace.

    Raises:
        ValueError: a field is too large or out of its range.
    """

    code: str
    language: str = PYTHON
    session: str = ""
    stdin: str = ""
    key: str = ""
    limits: Limits = Limits()
    deadline_s: float = 0.0

    def __post_init__(self) -> None:
        _check_bytes("code", self.code, MAX_CODE_BYTES)
        _check_bytes("stdin", self.stdin, MAX_STDIN_BYTES)
        _check_key(self.key)
        _check_key(self.session)
        if self.language not in LANGUAGES:
            raise ValueError(f"language = {self.language!r}: must be one of {', '.join(LANGUAGES)}")
        if self.session and (self.language != PYTHON or self.stdin):
            raise ValueError("a cell of a session is Python without standard input")
        if not 0 <= self.deadline_s < 2**31:
            raise ValueError(f"deadline_s = {self.deadline_s!r}: must be 0 (derived from the limits) or seconds")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one execution gave.

    Args:
        status: see Status.
        stdout, stderr: captured text; of long output the head and the tail, with a line that counts what is left out.
        exit_code: of the program, or None when it did not exit by itself.
        signal: name of the signal that ended it, or "".
        queue_s: seconds between the caller's call and the start of the run.
        run_s: seconds of wall time it ran; cpu_s: CPU seconds it used.
        tier: isolation that it ran under.
        detail: for REJECTED and INFRA: what happened, in one line.
        at: for a cell whose session lives on: the node that keeps it.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    signal: str = ""
    queue_s: float = 0.0
    run_s: float = 0.0
    cpu_s: float = 0.0
    tier: str = ""
    detail: str = ""
    at: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What grading one final turn gave.

    Args:
        verdict: see Verdict.
        answer: the text that was found in the answer's box, or None.
        reason: why, in a word or two.
        exact: what the exact rules said: True, False, or None when they could not decide.
        library: the second opinion, or None when it was not asked, not there, or gave none.
        rules: version of the rules and hash of their vectors.
        run_s: seconds that grading took.
    """

    verdict: Verdict
    answer: str | None = None
    reason: str = ""
    exact: bool | None = None
    library: bool | None = None
    rules: str = ""
    run_s: float = 0.0

    @property
    def disagree(self) -> bool:
        """True when the exact rules and the library both decided, and differently."""
        return self.exact is not None and self.library is not None and self.exact != self.library


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """An envelope in the queue: what to do, for whom, and until when.

    Args:
        run: name of the run; key: idempotency key inside it; epoch: see keys.epoch.
        lane: one of keys.LANES.
        reply: channel that the result is announced on.
        expires: Redis server time in seconds after which starting it is pointless.
        body: fields of the Execution, or text and gold of a verification.
        deliveries: how often it was handed to a node that died with it.
    """

    run: str
    key: str
    epoch: int
    lane: str
    reply: str
    expires: float
    body: Mapping[str, Any]
    deliveries: int = 0


_LIMITS = tuple(field.name for field in dataclasses.fields(Limits))
_OUTCOME = tuple(field.name for field in dataclasses.fields(Outcome))
_VERIFICATION = tuple(field.name for field in dataclasses.fields(Verification))


def _check_bytes(name: str, text: str, limit: int) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be text, got {type(text).__name__}")
    if 4 * len(text) <= limit:
        return
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise ValueError(f"{name} has {size} bytes, the limit is {limit}: shorten it")


def _is_torn(text: str) -> bool:
    """True when a text holds half a character (a surrogate), which no Redis key can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _check_key(key: str) -> None:
    if not isinstance(key, str) or len(key) > MAX_KEY_CHARS:
        raise ValueError(f"key = {key!r:.80}: must be text of at most {MAX_KEY_CHARS} characters; hash it first")
    if _is_torn(key):
        raise ValueError(f"key = {key!r}: holds half a character (a surrogate); hash it first")


def check_run(run: str) -> None:
    """Raise ValueError when a run's name cannot be part of a Redis key."""
    _check_key(run)
    if not run:
        raise ValueError("run is empty: name the run, since idempotency keys live inside it")


def check_verification(text: str, gold: str, key: str) -> None:
    """Raise ValueError when a verification cannot be sent."""
    _check_bytes("text", text, MAX_TEXT_BYTES)
    _check_bytes("gold", gold, MAX_CODE_BYTES)
    _check_key(key)


def execution_body(execution: Execution) -> dict[str, Any]:
    """The part of an Execution that the node needs."""
    limits = execution.limits
    return {
        "code": execution.code,
        "stdin": execution.stdin,
        "language": execution.language,
        "session": execution.session,
        "limits": {name: getattr(limits, name) for name in _LIMITS},
    }


@functools.lru_cache(maxsize=64)
def _limits(**fields: float) -> Limits:
    return Limits(**fields)  # type: ignore[arg-type]


def execution_from_body(body: Mapping[str, Any], key: str) -> Execution:
    """Inverse of execution_body. Raises ProtocolError naming what is wrong."""
    try:
        return Execution(
            code=body["code"],
            stdin=body["stdin"],
            language=body["language"],
            session=body["session"],
            key=key,
            limits=_limits(**body["limits"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not an execution: {type(error).__name__}: {error}") from error


def batches(calls: list[Call], size: int) -> list[str]:
    """Stream entries for calls: at most `size` calls each, and no second call once an entry has BATCH_BYTES."""
    entries, part, weight = [], [], 0
    for call in calls:
        part.append(call)
        weight += sum(len(value) for value in call.body.values() if isinstance(value, str))
        if len(part) >= size or weight >= BATCH_BYTES:
            entries.append(encode_calls(part))
            part, weight = [], 0
    return entries + ([encode_calls(part)] if part else [])


def encode_calls(calls: list[Call]) -> str:
    """One stream entry. ASCII JSON: any text survives, lone surrogates included."""
    rows = [[c.run, c.key, c.epoch, c.lane, c.reply, c.expires, c.body, c.deliveries] for c in calls]
    return json.dumps(rows, separators=(",", ":"))


def decode_calls(payload: str | bytes) -> list[Call]:
    """Inverse of encode_calls. Raises ProtocolError naming what is wrong."""
    names = ("run", "key", "epoch", "lane", "reply", "expires", "body", "deliveries")
    try:
        rows = json.loads(payload)
        calls = [Call(**dict(zip(names, row, strict=True))) for row in rows]
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a batch of calls: {type(error).__name__}: {error}") from error
    for call in calls:
        texts = (call.run, call.key, call.lane, call.reply)
        if not all(isinstance(text, str) for text in texts) or not isinstance(call.body, dict):
            raise ProtocolError(f"not a call: {texts!r}")
        if not all(isinstance(n, int | float) for n in (call.epoch, call.expires, call.deliveries)):
            raise ProtocolError(f"a call's numbers are not numbers: {call.key!r}")
        if _is_torn("".join(texts)):
            raise ProtocolError(f"half a character in the names of a call: {texts!r}")
    return calls


def encode_result(key: str, result: Outcome | Verification) -> str:
    """A finished call as ASCII JSON, with its key in front."""
    kind, names = ("o", _OUTCOME) if isinstance(result, Outcome) else ("v", _VERIFICATION)
    return json.dumps([key, kind, {name: getattr(result, name) for name in names}], separators=(",", ":"))


def decode_result(payload: str | bytes) -> tuple[str, Outcome | Verification]:
    """Inverse of encode_result. Raises ProtocolError naming what is wrong."""
    try:
        return _result(json.loads(payload))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a result: {type(error).__name__}: {error}") from error


def decode_results(payload: str | bytes) -> list[tuple[str, Outcome | Verification]]:
    """The results of one announcement: a JSON list of what encode_result gives. Raises ProtocolError."""
    try:
        rows = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not results: {type(error).__name__}: {error}") from error
    if not isinstance(rows, list):
        raise ProtocolError(f"not results: a {type(rows).__name__}")
    return [_result(row) for row in rows]


def _result(row: Any) -> tuple[str, Outcome | Verification]:
    try:
        key, kind, fields = row
        if not isinstance(key, str):
            raise TypeError(f"a key that is a {type(key).__name__}")
        if kind == "o":
            return key, Outcome(**(fields | {"status": Status(fields["status"])}))
        return key, Verification(**(fields | {"verdict": Verdict(fields["verdict"])}))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not a result: {type(error).__name__}: {error}") from error


def decode_news(payload: str | bytes) -> tuple[Any, ...]:
    """What the control channel says: ("run", lane) or ("epoch", run, number). Raises ProtocolError."""
    try:
        news = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not news: {type(error).__name__}: {error}") from error
    if isinstance(news, list) and [type(part) for part in news] in ([str, str], [str, str, int]):
        return tuple(news)
    raise ProtocolError(f"not news: {payload!r:.80}")


def result_ttl_s(payload: str) -> int:
    """Seconds that a result is kept: long for a small one, shorter for a large one, so that memory stays bounded."""
    return max(MIN_TTL_S, min(RESULT_TTL_S, _KEPT_BYTE_SECONDS // max(1, len(payload))))
