"""Random and mutated inputs through everything that reads what others wrote: none may crash it.

python tests/sandbox/fuzz.py [COUNT] [SEED]        (make fuzz: one million)
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time

from rstar2_jax.tools import parse
from rstar2_sandbox import capture, front, jail_child, protocol, sql_child, verify
from rstar2_sandbox.protocol import Call, Execution, Outcome, ProtocolError, Status, Verdict, Verification

EXECUTION = Execution(code="print(1)", stdin="x", key="k")
CALL = Call(
    run="r", key="k", epoch=1, lane="execute", reply="c", expires=1.5, body=protocol.execution_body(EXECUTION)
)  # fmt: skip
OUTCOME = protocol.encode_result("k", Outcome(status=Status.OK, stdout="a\ud800"))
VERDICT = protocol.encode_result("k", Verification(verdict=Verdict.WRONG, answer="\\frac{1}{2}", exact=False))
SEEDS = [
    protocol.encode_calls([CALL, CALL]),
    OUTCOME,
    VERDICT,
    f"[{OUTCOME},{VERDICT}]",
    '["run","execute"]',
    '["epoch","r",3]',
    '<tool_call>\n{"name": "f", "arguments": {"code": "print(\\"</tool_call>\\")"}}\n</tool_call> text',
    '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": null}], "c": 1e308, "d": "\\ud83d\\ude00"}}</tool_call>' * 2,
    r"<reason>so</reason><answer>\boxed{\frac{1}{2}} or \boxed{1{,}234\text{ cm}} 17 \pmod{19}</answer>",
    r"<answer>\fbox{x = 2\frac{2}{3}^{10}! \cdot (3 - 4)} \boxed{\{1,2\}}</answer>",
    "POST /run/batch?x=1 HTTP/1.1\r\nContent-Length: 12\r\nHost: a\r\nExpect: 100-continue",
    '{"sub_id": "s", "submissions": [{"type": "python", "solution": "1", "input": null, "expected_output": "1"}]}',
    "create table t(a); insert into t values ('x;y'); select * from t -- ;\n; create trigger g after insert on t begin "
    "select 1; end;",
    "def f():\n    return 1\nprint(f())\nf()",
    "\u2212\uff11 \u202f\x00\x1b[31m \ud800 e\u0301",
]
TOKENS = [
    "{", "}", "[", "]", '"', "\\", ",", ":", "null", "true", "-", "1e999", "9" * 5000, "\\ud800", "<tool_call>",
    "</tool_call>", "<answer>", "</answer>", "\\boxed{", "\\frac", "^", "!", "\\text{", "=", "\r\n", ";", "'", "\x00",
    "[" * 2000, "{" * 500, "(" * 300, "Content-Length: ", "\u2212", "\U0001f600", "\ud800", "name", "arguments",
]  # fmt: skip


def mutated(draw: random.Random) -> str:
    """A seed with a few changes, or noise."""
    if draw.random() < 0.1:
        letters = (draw.choice((draw.randrange(128), draw.randrange(0x11000))) for _ in range(draw.randrange(80)))
        return "".join(map(chr, letters))
    text = draw.choice(SEEDS)
    for _ in range(draw.randint(1, 4)):
        at, other = draw.randint(0, len(text)), draw.randint(0, len(text))
        low, high = min(at, other), max(at, other)
        token = draw.choice(TOKENS)
        text = (
            text[:at] + token + text[at:],
            text[:low] + text[min(high, low + draw.randint(1, 8)) :],
            text[:high] + text[low:],
            text[:at] + chr(draw.randrange(256)) + text[at + 1 :],
            text[:at] + draw.choice(SEEDS)[other % 40 :],
            text[:low] + token + text[high:],
        )[draw.randrange(6)]
    return text[:20_000]


def _wire(text: str, raw: bytes) -> None:
    for payload in (text, raw):
        for decode in (protocol.decode_result, protocol.decode_results, protocol.decode_news):
            try:
                decode(payload)
            except ProtocolError:
                continue
        try:
            calls = protocol.decode_calls(payload)
        except ProtocolError:
            continue
        assert protocol.decode_calls(protocol.encode_calls(calls)) == calls or "NaN" in text or "nan" in repr(calls)
        for call in calls:
            try:
                protocol.execution_from_body(call.body, call.key)
            except ProtocolError:
                continue


def _front(text: str, raw: bytes) -> None:
    try:
        front.body_bytes(front.head(raw)[2])
    except front.RefusedError:
        pass
    try:
        front.submissions(json.loads(text))
    except (front.RefusedError, ValueError, RecursionError):
        pass


def _texts(text: str, draw: random.Random) -> None:
    calls = parse.parse(text)
    assert all(call.error is not None or isinstance(call.arguments, dict) for call in calls)
    assert 0.0 <= parse.repeat_share(calls) <= 1.0
    gold = draw.choice(("17", "1/2", text[:60]))
    assert verify.judge(text, gold).verdict in (Verdict.CORRECT, Verdict.WRONG)
    script = text[:2000].encode("utf-8", "replace").decode().replace("\0", " ")
    assert "".join(sql_child.statements(script)).strip() == script.strip()
    jail_child._ends_with_print(text)


class Decoder:
    """The node's reading of a pipe, with bytes cut anywhere."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def check(self, raw: bytes, draw: random.Random) -> None:
        """Whatever comes through a pipe is text at the end, no longer than what was kept and the line between."""
        keep = draw.choice((2, 7, 64, 4096))
        found = capture.Capture(self._loop, keep, lambda: None)
        try:
            os.write(found.child_fd, raw[:60_000])
            text = found.take()
        finally:
            found.finish()
        text.encode("utf-8")
        assert len(text) <= max(keep, 2) + 60, (keep, text)

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()


def run(count: int, seed: int) -> None:
    """Put so many inputs through everything. Raises what crashed, with the input in a note."""
    draw, decoder = random.Random(seed), Decoder()
    try:
        for number in range(count):
            text = mutated(draw)
            raw = text.encode("utf-8", "surrogatepass")
            try:
                _wire(text, raw)
                _front(text, raw)
                _texts(text, draw)
                if number % 4 == 0:
                    decoder.check(raw, draw)
            except Exception as error:
                error.add_note(f"input {number} of seed {seed}: {text!r:.2000}")
                raise
    finally:
        decoder.close()


def main() -> None:
    """See the module's docstring."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    started = time.process_time()
    run(count, seed)
    print(f"{count} inputs, seed {seed}: no crash, {time.process_time() - started:.0f} CPU seconds")


if __name__ == "__main__":
    main()
