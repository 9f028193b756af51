"""A workdir belongs to one run at a time: a second one would delete what the first is about to write.

The kernel holds the lock for as long as the process lives, so that nothing has to be cleaned after a kill. Deliberately
not here: what a run finds in its workdir (run_record.py).
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

_NAME = ".lock"


class LockedError(RuntimeError):
    """Another process uses the folder, or it cannot be used at all."""


@contextlib.contextmanager
def hold(folder: str | os.PathLike[str], warn: Callable[[str], None]) -> Iterator[None]:
    """Keep the folder, which is made where it is missing, to this process.

    Args:
        warn: receives one line where the file system has no locks.

    Raises:
        LockedError: it is taken (by whom, and what to do), or cannot be made or written.
    """
    path = Path(folder) / _NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as fault:
        raise LockedError(f"workdir {folder} cannot be used: {fault.strerror}; give another --workdir") from fault
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise LockedError(
                f"workdir {folder} is in use by {holder}: wait for it, end it, or give another --workdir"
            ) from fault
        except OSError as fault:
            warn(f"{path} cannot be locked ({fault.strerror}): see to it yourself that no second run uses the folder")
        else:
            file.truncate(0)
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n")
            file.flush()
        yield
