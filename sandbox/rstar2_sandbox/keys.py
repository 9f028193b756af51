"""Every Redis key of the service, in one place. All start with one prefix, so that a shared Redis stays readable."""

from __future__ import annotations

PREFIX = "rstar2"
GROUP = "nodes"
EXECUTE = "execute"
VERIFY = "verify"
LANES = (EXECUTE, VERIFY)


def stream(lane: str) -> str:
    """Stream of a lane; one entry is a micro-batch of calls."""
    return f"{PREFIX}:calls:{lane}"


def result(run: str, key: str) -> str:
    """String that holds the result of one call, written once, with an expiry."""
    return f"{PREFIX}:result:{run}:{key}"


def replies(client_id: str) -> str:
    """Channel on which a client hears of finished calls."""
    return f"{PREFIX}:replies:{client_id}"


def epoch(run: str) -> str:
    """Integer: calls of this run with a lower epoch are dropped before they start."""
    return f"{PREFIX}:epoch:{run}"


def nodes() -> str:
    """Sorted set: member = node name, "/", slots; score = server time until which its heartbeat counts."""
    return f"{PREFIX}:nodes"


def reaper_lock() -> str:
    """String with an expiry: held by the one node that returns the calls of dead nodes to the queue."""
    return f"{PREFIX}:reaper"
