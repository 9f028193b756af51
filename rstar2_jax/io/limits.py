"""Limits of this process that a run would meet."""

from __future__ import annotations

import errno
import resource


def raise_open_files() -> int:
    """Let this process open as many files and connections as it may; returns how many.

    Each turn in flight is a connection, and the usual 1,024 are few for thousands of episodes.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def met_open_files(error: BaseException | None) -> str | None:
    """What to say where an error, or one behind it, comes of too many open files; None where it does not."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            break
        error = error.__cause__ or error.__context__
    else:
        return None
    if error.errno == errno.ENFILE:
        return f"this machine has opened all the files that it may ({error.strerror}): raise fs.file-max"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process has opened all the files and connections that it may, RLIMIT_NOFILE = {soft} (hard limit "
        f"{hard}); each turn in flight is one. Raise the hard limit (ulimit -Hn, LimitNOFILE= of a service, --ulimit "
        "nofile of a container), or have fewer in flight (Rollout.prompts_per_step, Rollout.oversample)"
    )
