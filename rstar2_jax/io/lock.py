"""A workdir belongs to one run at a time: a second one would delete what the first is about to write.

The kernel holds the lock for as long as the process lives, so that nothing has to be cleaned after a kill. A file
server gives back the locks of a host that died only when its lease is over, so a start waits a while for them.

Deliberately not here: what a run finds in its workdir (run_record.py).
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

WAIT_S = 120.0
_NAME = ".lock"
_AGAIN_S = 0.5


class LockedError(RuntimeError):
    """Another process uses the folder, or it cannot be used at all."""


@contextlib.contextmanager
def hold(folder: str | os.PathLike[str], warn: Callable[[str], None]) -> Iterator[None]:
    """Keep the folder, which is made where it is missing, to this process.

    Args:
        warn: receives one line where it has to wait, or where the file system has no locks.

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
            _take(file, folder, warn)
        except OSError as fault:
            warn(f"{path} cannot be locked ({fault.strerror}): see to it yourself that no second run uses the folder")
        else:
            file.truncate(0)
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n")
            file.flush()
        yield


def _take(file: IO[str], folder: str | os.PathLike[str], warn: Callable[[str], None]) -> None:
    give_up = time.monotonic() + WAIT_S
    told = False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as fault:
            file.seek(0)
            by = f"workdir {folder} is in use by {file.read().strip() or 'another process'}"
            if time.monotonic() > give_up:
                raise LockedError(f"{by}: wait for it, end it, or give another --workdir") from fault
            if not told:
                warn(f"{by}: waiting {WAIT_S:g} s for its end")
            told = True
            time.sleep(_AGAIN_S)
