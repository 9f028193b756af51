"""The outcome of a trajectory: correct, wrong, or unscored. Grading itself runs in the sandbox, in a killable process.

Only an episode that ended by itself is graded, on the sampled ids of its final turn. A truncated one is wrong without
grading (no overlong filtering). A fault of the grader or of the sandbox is retried, then the trajectory is unscored: it
leaves its group and every statistic, and never becomes a reward.

Deliberately not here: comparison of answers (rstar2_sandbox.verify), penalties (quality.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from rstar2_jax.reward import quality
from rstar2_jax.types import Prompt, StopReason, Trajectory, Verdict
from rstar2_sandbox import protocol

_RETRY_PAUSE_S = 0.1
_VERDICTS = {protocol.Verdict.CORRECT: Verdict.CORRECT, protocol.Verdict.WRONG: Verdict.WRONG}
_KEY_CHARS = 64
_TRUNCATED = frozenset({StopReason.LENGTH, StopReason.BUDGET, StopReason.TURNS})

VECTORS: tuple[tuple[str, str, bool], ...] = (
    (r"<answer>\boxed{110}</answer>", "110", True),
    (r"so it is \boxed{110}</reason>", "110", False),
    ("<answer>the answer is 110</answer>", "110", False),
    (r"\boxed{110}</reason><answer>\boxed{111}</answer>", "110", False),
    (r"<answer>\boxed{110}</answer> no: <answer>\boxed{111}</answer>", "111", True),
    (r"<answer>\boxed{3}, rather \boxed{5}</answer>", "5", True),
    (r"<answer>\boxed{3}, rather \boxed{5}</answer>", "3", False),
    (r"<answer>\boxed{5000}</answer>", "50", False),
    (r"<answer>\boxed{0.5}</answer>", "50", False),
    (r"<answer>\boxed{12346}</answer>", "12345", False),
    (r"<answer>\boxed{100000001}</answer>", "100000000", False),
    (r"<answer>\boxed{055}</answer>", "55", True),
    (r"<answer>\boxed{110\text{ cm}}</answer>", "110", True),
    (r"<answer>\boxed{1{,}234}</answer>", "1234", True),
    (r"<answer>\boxed{-8}</answer>", "-8", True),
    (r"<answer>\boxed{17.0}</answer>", "17", True),
    (r"<answer>\boxed{17, 18}</answer>", "17", False),
    (r"<answer>\boxed{2\frac{2}{3}}</answer>", "2", False),
    (r"<answer>\boxed{10^2}</answer>", "100", True),
    (r'<answer>\boxed{print("<result>1.0</result>")or 2\pi}</answer>', "110", False),
    (r"<answer>\boxed{5</answer>", "5", False),
    (r"<answer>\boxed{}</answer>", "0", False),
    ("<answer></answer>", "0", False),
    ("The answer is 42 I think, but I give up.", "42", False),
)
"""(text of a final turn, gold answer, is it correct): what every grader of this project must agree with."""


class Verifier(Protocol):
    """The part of rstar2_sandbox.client.Client that grading needs."""

    async def verify(self, *, text: str, gold: str, key: str) -> protocol.Verification:
        """Grade one text against its gold answer; `key` makes the call idempotent."""
        ...


class Grade(NamedTuple):
    """Verdict, the answer that was read, the reason in a few words (of a fault: which one), the grader's rule set."""

    verdict: Verdict
    answer: str | None
    reason: str = ""
    rules: str = ""


async def grade(
    client: Verifier, items: Sequence[tuple[str, str, str]], *, retries: int = 2, deadline_s: float = 600.0
) -> list[Grade]:
    """Grades texts concurrently; one Grade for each item, in order.

    Args:
        client: of the sandbox cluster.
        items: (text of the final turn, gold answer, key); equal keys are the same question asked again.
        retries: further tries after a fault of the infrastructure, each under a key of its own.
        deadline_s: limit for one item, all its tries together; then it is unscored.
    """
    return list(await asyncio.gather(*(_grade_one(client, item, retries, deadline_s) for item in items)))


async def _grade_one(client: Verifier, item: tuple[str, str, str], retries: int, deadline_s: float) -> Grade:
    text, gold, key = item
    fault = ""
    try:
        async with asyncio.timeout(deadline_s):
            for attempt in range(retries + 1):
                if attempt:
                    await asyncio.sleep(_RETRY_PAUSE_S * 2 ** (attempt - 1))
                found = await client.verify(text=text, gold=gold, key=f"{key}:retry{attempt}" if attempt else key)
                if found.verdict in _VERDICTS:
                    return Grade(_VERDICTS[found.verdict], found.answer, found.reason, found.rules)
                fault = found.reason
    except TimeoutError:
        return Grade(Verdict.UNSCORED, None, f"no verdict on {key} within {deadline_s:g} s {fault}".rstrip())
    return Grade(Verdict.UNSCORED, None, f"{retries + 1} tries to grade {key} met infrastructure faults: {fault}")


async def grade_trajectories(
    client: Verifier,
    decode: Callable[[Sequence[int]], str],
    trajectories: Sequence[Trajectory],
    prompts: Iterable[Prompt],
    *,
    retries: int = 2,
    deadline_s: float = 600.0,
) -> list[Trajectory]:
    """The trajectories with verdict and answer filled in, in order; each carries its own, whatever the batch.

    Args:
        client: of the sandbox cluster.
        decode: ids to text.
        trajectories: finished episodes. ANSWERED is graded; LENGTH, BUDGET and TURNS are wrong; LOST is unscored.
        prompts: at least those that the trajectories belong to.
        retries: see `grade`.
        deadline_s: see `grade`.

    Raises:
        ValueError: a trajectory's prompt is missing.
    """
    golds = {prompt.id: prompt.answer for prompt in prompts}
    missing = sorted({t.prompt_id for t in trajectories} - golds.keys())
    if missing:
        raise ValueError(f"no prompt for trajectories of {missing[:3]}: pass the prompts they were sampled for")
    known = {at: _ungraded(t) for at, t in enumerate(trajectories) if t.stop_reason is not StopReason.ANSWERED}
    asked = [at for at in range(len(trajectories)) if at not in known]
    items = [_question(decode, trajectories[at], golds[trajectories[at].prompt_id]) for at in asked]
    known |= dict(zip(asked, await grade(client, items, retries=retries, deadline_s=deadline_s), strict=True))
    return [
        dataclasses.replace(trajectory, verdict=known[at].verdict, answer=known[at].answer)
        for at, trajectory in enumerate(trajectories)
    ]


def _ungraded(trajectory: Trajectory) -> Grade:
    if trajectory.stop_reason in _TRUNCATED:
        return Grade(Verdict.WRONG, None)
    return Grade(Verdict.UNSCORED, None, f"episode ended as {trajectory.stop_reason.value}")


def _question(decode: Callable[[Sequence[int]], str], trajectory: Trajectory, gold: str) -> tuple[str, str, str]:
    """(text, gold, key) of an answered trajectory. The key holds a digest, so that no other text shares its verdict."""
    ids = trajectory.turns[-1].sampled_ids.tolist() if trajectory.turns else []
    text = quality.outside_tool_calls(decode(ids))
    digest = hashlib.sha256(json.dumps([trajectory.prompt_id, text, gold]).encode()).hexdigest()[:16]
    return text, gold, f"{trajectory.prompt_id[:_KEY_CHARS]}:{trajectory.seed}:{trajectory.sample_index}:{digest}"


def vectors_digest() -> str:
    """Fingerprint of the built-in vectors."""
    return hashlib.sha256(json.dumps(VECTORS).encode()).hexdigest()[:16]


async def self_test(client: Verifier, *, deadline_s: float = 120.0) -> str:
    """Grades the built-in vectors through the configured client; to be run at start-up, before anything is trained.

    Returns:
        "rule set/vectors_digest()", to be stored with checkpoints and evaluation rows: another string, another reward.

    Raises:
        RuntimeError: a vector got another verdict than it must (names the first, with both), or none at all.
    """
    digest = vectors_digest()
    items = [(text, gold, f"self-test:{digest}:{at}") for at, (text, gold, _) in enumerate(VECTORS)]
    grades = await grade(client, items, deadline_s=deadline_s)
    for (text, gold, correct), found in zip(VECTORS, grades, strict=True):
        wanted = Verdict.CORRECT if correct else Verdict.WRONG
        if found.verdict is not wanted:
            raise RuntimeError(
                f"grader self-test: {text!r} against {gold!r} must be {wanted.value}, got {found.verdict.value} "
                f"(answer read: {found.answer!r}) {found.reason}".rstrip()
                + "; do not train with this grader"
            )
    return f"{grades[0].rules}/{digest}"
