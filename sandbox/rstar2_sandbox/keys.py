"""Every Redis key of the service, in one place. All start with one prefix, so that a shared Redis stays readable."""

from __future__ import annotations

PREFIX = "rstar2"
GROUP = "nodes"
EXECUTE = "execute"
VERIFY = "verify"
SESSION = "session"
LANES = (EXECUTE, VERIFY, SESSION)
# How a script begins that must get through when Redis is full: it takes and removes nothing, but a script that has
# begun to write may go on, and it is by answers, leases and their like that Redis gets empty again.
GO_ON = f"redis.call('DEL', '{PREFIX}:nothing')\n"


def stream(lane: str, run: str) -> str:
    """Stream of one run's calls in a lane; one entry is a micro-batch. A stream for each run, so that runs share."""
    return f"{PREFIX}:calls:{lane}:{run}"


def runs(lane: str) -> str:
    """Set: runs that have a stream in this lane."""
    return f"{PREFIX}:runs:{lane}"


def at_node(node: str) -> str:
    """Stream of calls for one node only: cells of sessions that live there."""
    return f"{PREFIX}:calls:at:{node}"


def control() -> str:
    """Channel on which every node listens: a new run, a new epoch."""
    return f"{PREFIX}:control"


def dead_letters() -> str:
    """Stream, trimmed: what was known of calls that were given up."""
    return f"{PREFIX}:dead"


def statistics() -> str:
    """Hash: node name to what it counted, as JSON; see metrics."""
    return f"{PREFIX}:statistics"


def result(run: str, key: str) -> str:
    """String that holds the result of one call, written once, with an expiry. The length keeps two runs apart whose
    names and keys hold colons."""
    return f"{PREFIX}:result:{len(run)}:{run}:{key}"


def started(run: str, key: str) -> str:
    """Integer with an expiry: the delivery at which a call that had lost a node before was last started."""
    return f"{PREFIX}:started:{len(run)}:{run}:{key}"


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
