"""What travels: everything that can be said survives the codec, and nothing else gets in."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_sandbox import keys, protocol
from rstar2_sandbox.protocol import Call, Execution, Limits, Outcome, ProtocolError, Status, Verdict, Verification

TEXT = st.text(alphabet=st.characters(), max_size=50) | st.sampled_from(["\ud800", "a\0b", "\x1b[31m", "∀"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(TEXT, TEXT)
def test_an_execution_survives_the_way_to_the_node(code, stdin):
    execution = Execution(code=code, stdin=stdin, key="k", limits=Limits(wall_s=0.5))
    call = Call(
        run="r", key="k", epoch=1, lane=keys.EXECUTE, reply="c", expires=1.5, body=protocol.execution_body(execution)
    )
    (entry,) = protocol.batches([call], 64)
    (back,) = protocol.decode_calls(entry)
    assert back == call
    assert protocol.execution_from_body(back.body, back.key) == execution


@given(TEXT, TEXT, st.sampled_from(Status), st.floats(0, 1e6))
def test_a_result_survives_the_way_back(stdout, stderr, status, seconds):
    outcome = Outcome(status=status, stdout=stdout, stderr=stderr, run_s=seconds, exit_code=3)
    assert protocol.decode_result(protocol.encode_result("k", outcome)) == ("k", outcome)
    verification = Verification(verdict=Verdict.WRONG, answer=stdout, reason=stderr, exact=False, library=True)
    assert protocol.decode_result(protocol.encode_result("k", verification)) == ("k", verification)
    assert verification.disagree


@given(JSON)
def test_other_json_is_refused_and_never_crashes(value):
    payload = json.dumps(value)
    for decode in (protocol.decode_calls, protocol.decode_result):
        try:
            decode(payload)
        except ProtocolError:
            pass
    if isinstance(value, dict):
        with pytest.raises(ProtocolError):
            protocol.execution_from_body({"code": value}, "k")


@given(st.binary(max_size=100))
def test_bytes_that_are_no_json_are_refused(payload):
    for decode in (protocol.decode_calls, protocol.decode_result):
        try:
            decode(payload)
        except ProtocolError:
            pass
    with pytest.raises(ProtocolError):
        protocol.decode_result(b"[" * 100_000)


def test_a_batch_holds_64_calls_or_a_mebibyte():
    def call(size):
        return Call(run="r", key="k", epoch=0, lane="execute", reply="c", expires=0, body={"code": "x" * size})

    assert len(protocol.batches([call(1)] * 130, 64)) == 3
    assert len(protocol.batches([call(2**19)] * 4, 64)) == 2
    assert protocol.batches([], 64) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Execution(code="x" * (protocol.MAX_CODE_BYTES + 1)),
        lambda: Execution(code="", stdin="∀" * protocol.MAX_STDIN_BYTES),
        lambda: Execution(code="", key="k" * 201),
        lambda: Execution(code="", key="\ud800"),
        lambda: Execution(code=None),
        lambda: Limits(wall_s=0),
        lambda: Limits(wall_s=float("nan")),
        lambda: Limits(memory_bytes=-1),
        lambda: Limits(cpu_s=-1),
        lambda: protocol.check_verification("x" * (protocol.MAX_TEXT_BYTES + 1), "1", ""),
        lambda: protocol.check_run(""),
    ],
)
def test_what_is_out_of_range_is_an_error_that_names_it(make):
    with pytest.raises(ValueError, match=r"bytes|key|wall_s|memory_bytes|cpu_s|code|run"):
        make()
