"""Limits of this process that a run would meet."""

from __future__ import annotations

import resource


def raise_open_files() -> int:
    """Let this process open as many files and connections as it may; returns how many.

    Each turn in flight is a connection, and the usual 1,024 are few for thousands of episodes.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
