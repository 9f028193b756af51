"""The process of a session: runs cell after cell in one namespace. What the process itself says is taken for nothing
but the end of a cell: output and time come from the pipes and the kernel, as everywhere.

A program could read its own control socket and answer in the loop's place; it would cheat nobody but itself.
"""

from __future__ import annotations

import os
import socket
import sys

from rstar2_sandbox import jail_child


def run(control_fd: int) -> int:
    """Serve cells until the other end is closed; return the exit code.

    A message is the cell's number, with one descriptor that holds its source; the answer is the same number and one
    byte, the cell's exit code.
    """
    control = socket.socket(fileno=control_fd)
    streams = sys.stdout, sys.stderr
    namespace = jail_child.namespace()
    count = 0
    while True:
        number, fds, _, _ = socket.recv_fds(control, 64, 1)
        if not number or not fds:
            return jail_child.finish()
        source = os.pread(fds[0], os.fstat(fds[0]).st_size, 0)
        os.close(fds[0])
        if count == 0:
            jail_child.seed(source)
        count += 1
        code = _cell(source, namespace, f"<cell {count}>")
        for stream in streams:
            if not stream.closed:
                code = jail_child.guard(stream.flush, silent=True) or code
        control.send(number + bytes([code]))


def _cell(source: bytes, namespace: dict[str, object], name: str) -> int:
    return jail_child.guard(lambda: jail_child.execute(source, namespace, name))
