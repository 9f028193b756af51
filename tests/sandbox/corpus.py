"""The hostile corpus: what each program does, what must become of it, and where a tier differs.

Every case runs in a jail with limits around it. PORT stands for a listener of the test's own on loopback.
"""

from __future__ import annotations

import dataclasses

from rstar2_sandbox.protocol import Limits, Status

OK, ERROR, WALL, CPU = Status.OK, Status.ERROR, Status.TIMEOUT_WALL, Status.TIMEOUT_CPU
OOM, KILLED, FLOOD = Status.OOM, Status.KILLED, Status.OUTPUT_LIMIT
BOUNDED = frozenset(Status) - {Status.INFRA, Status.REJECTED}
SHORT = Limits(wall_s=0.7)
LONG = Limits(wall_s=6.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program; the statuses that are right; its whole output, or a part of what it wrote as errors; its input."""

    code: str
    wanted: Status | frozenset[Status]
    stdout: str | None = None
    stderr: str | None = None
    stdin: str = ""
    limits: Limits = LONG
    namespaces_only: bool = False

    @property
    def statuses(self) -> frozenset[Status]:
        """The statuses that are right, as a set."""
        return frozenset({self.wanted}) if isinstance(self.wanted, Status) else self.wanted


def ends(code, wanted=OK, stdout=None, stderr=None, **more):
    return Case(code, wanted, stdout, stderr, **more)


def hangs(code):
    return Case(code, WALL, limits=SHORT)


def refused(code, **more):
    return Case(code, ERROR, **more)


def libc(expression):
    return refused(f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nassert {expression} >= 0")


ENDINGS = {
    "nothing at all": ends("", stdout=""),
    "a comment alone": ends("# nothing", stdout=""),
    "exit zero": ends("import sys; sys.exit(0)", stderr=""),
    "exit three": ends("import sys; sys.exit(3)", ERROR),
    "exit with text": ends("import sys; sys.exit('boom')", ERROR, stderr="boom\n"),
    "exit out of a function": ends("def f():\n  raise SystemExit(0)\nf()"),
    "exit at once after a print": ends("import os\nprint('a')\nos._exit(0)", stdout="a\n"),
    "closes its standard output": ends("import os\nos.close(1)\nprint('x')", ERROR),
    "closes the object of its standard output": ends("import sys\nprint('x')\nsys.stdout.close()", stdout="x\n"),
    "output that looks like a mark": ends("print('--END-- {\"status\": \"ok\"}')", stdout='--END-- {"status": "ok"}\n'),
    "prints the word error": ends("print('Traceback (most recent call last): error')", OK),
    "division by zero": ends("1/0", ERROR, stderr="ZeroDivisionError"),
    "keyboard interrupt": ends("raise KeyboardInterrupt", ERROR),
    "exception whose text fails": ends("class E(Exception):\n  def __str__(self): 1/0\nraise E", ERROR),
    "exit handler speaks": ends("import atexit\n_ = atexit.register(print, 'bye')", stdout="bye\n"),
    "exit handler fails": ends("import atexit\natexit.register(lambda: 1/0)", BOUNDED),
    "input beyond what there is": ends("input(); input()", ERROR, stderr="EOFError", stdin="one\n"),
    "a mebibyte of input": ends("import sys\nprint(len(sys.stdin.read()))", stdout="1000000\n", stdin="x" * 10**6),
    "does not read its input": ends("print(1)", stdout="1\n", stdin="x" * 10**6),
    "integer too long to print": ends("print(10**5000)", ERROR, stderr="ValueError"),
    "deletes its builtins": ends("del __builtins__\nprint(1)", BOUNDED),
    "event loop": ends("import asyncio\nprint(asyncio.run(asyncio.sleep(0, 7)))", stdout="7\n"),
    "another program in its place": ends("import os\nos.execv('/bin/echo', ['echo', 'hi'])", stdout="hi\n"),
    "a shell": ends("import subprocess\n"
                    "print(subprocess.run(['sh', '-c', 'echo $((6*7))'], capture_output=True).stdout)",
                    stdout="b'42\\n'\n"),
    "segmentation fault": ends("import ctypes\nctypes.string_at(0)", KILLED),
    "writes over memory": ends("import ctypes\nctypes.memset(id(int), 255, 4000)\nint('1') + int('2')", BOUNDED),
    "abort": ends("import os\nos.abort()", KILLED),
    "kills itself": ends("import os\nos.kill(os.getpid(), 9)", KILLED),
    "terminates itself": ends("import os\nos.kill(os.getpid(), 15)", KILLED),
    "deep recursion": ends("def f(): f()\nf()", ERROR, stderr="RecursionError"),
    "recursion without a limit": ends("import sys\nsys.setrecursionlimit(10**9)\nclass A:\n"
                                      "  def __repr__(self): return repr(self)\nrepr(A())", BOUNDED),
    "NUL in the source": ends("print(1)\0", ERROR),
    "half a character in the source": ends("print('\ud800')", ERROR),
    "900 kilobytes of source": ends("x = 1\n" * 150_000 + "print(x)", stdout="1\n", limits=Limits(wall_s=20)),
    "3000 parentheses": ends("(" * 3000 + ")" * 3000, ERROR),
    "90000 minus signs": ends("print(" + "-" * 90_000 + "1)", BOUNDED, limits=Limits(wall_s=20)),
    "a line of 500 kilobytes": ends("x = '" + "y" * 500_000 + "'\nprint(len(x))", stdout="500000\n"),
    "descriptor that may carry results": ends(
        "import os\nn = 0\nfor fd in range(3, 64):\n  try: os.write(fd, b'{}'); n += 1\n"
        "  except OSError: pass\nprint(n)",
        stdout="0\n"),
}  # fmt: skip

HANGS = {
    "signals ignored": hangs("import signal\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n"
                             "  except (OSError, ValueError): pass\nwhile True: pass"),
    "alarm off and asleep": hangs("import signal, time\nsignal.alarm(0)\ntime.sleep(60)"),
    "endless loop": hangs("while True: pass"),
    "asleep": hangs("import time\ntime.sleep(60)"),
    "long call in C": hangs("pow(7, 10**9)"),
    "endless iterator in C": hangs("any(iter(int, 1))"),
    "endless match": hangs("import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')"),
    "stops itself": hangs("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
    "thread left running": hangs("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"),
    "exit handler that never ends": hangs("import atexit, time\natexit.register(time.sleep, 60)"),
    "waits on a pipe of its own": hangs("import os\nr, w = os.pipe()\nos.read(r, 1)"),
    "both outputs closed and asleep": hangs("import os, time\nos.close(1); os.close(2)\ntime.sleep(60)"),
    "processor limit's signal ignored": Case(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", CPU,
        limits=Limits(wall_s=20, cpu_s=1)),
    "children in a ring of signals": hangs("import os, time\nfor _ in range(5):\n  if os.fork() == 0:\n"
                                           "    os.setsid()\n    while True: time.sleep(0.01)\ntime.sleep(60)"),
}  # fmt: skip

AMOUNTS = {
    "memory at once": ends("x = bytearray(900 * 2**20)", OOM),
    "memory bit by bit": ends("x = []\nwhile True: x.append(bytearray(2**20))", OOM),
    "two gibibytes": ends("x = bytearray(2 * 2**30)", OOM),
    "flood of output": Case("import os\nwhile True: os.write(1, b'x' * 65536)", FLOOD, limits=Limits(wall_s=20)),
    "flood of errors": Case("import os\nwhile True: os.write(2, b'x' * 65536)", FLOOD, limits=Limits(wall_s=20)),
    "one large file": refused("with open('big', 'wb') as f:\n  for _ in range(100): f.write(bytes(10**6))"),
    "100 megabytes in many files": Case(
        "import time\nfor i in range(100):\n  with open(f'{i}', 'wb') as f: f.write(bytes(10**6))\ntime.sleep(3)",
        frozenset({ERROR, FLOOD})),
    "90 megabytes in shared memory": refused(
        "for i in range(3):\n  with open(f'/dev/shm/{i}', 'wb') as f: f.write(bytes(30 * 10**6))"),
    "5000 files": Case("import time\nfor i in range(5000): open(f'{i}', 'w').close()\ntime.sleep(3)",
                       frozenset({ERROR, FLOOD})),
    "100 children": refused("import os, time\nfor _ in range(100):\n  if os.fork() == 0: time.sleep(60)"),
    "children without end": Case("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
                                 frozenset({WALL, KILLED}), limits=SHORT),
    "100 threads": refused("import threading, time\nfor _ in range(100):\n"
                           "  threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"),
    "files in memory": refused("import os\nfiles = [os.memfd_create(f'{n}') for n in range(9)]"),
    "100 open files": refused("files = [open('/dev/null') for _ in range(100)]"),
}  # fmt: skip

REACHES = {
    "raises its own limits": refused("import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    "a better place at the processor": refused("import os\nos.nice(-5)"),
    "shadow": refused("open('/etc/shadow').read()"),
    "environment of process 1": refused("open('/proc/1/environ').read()"),
    "environment of the parent": refused("import os\nopen(f'/proc/{os.getppid()}/environ').read()"),
    "memory of the parent": refused("import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')"),
    "descriptors of the parent": refused("import os\nos.listdir(f'/proc/{os.getppid()}/fd')"),
    "the machine's memory": refused("open('/dev/mem', 'rb')"),
    "a knob of the kernel": refused("open('/proc/sys/kernel/core_pattern', 'w')"),
    "the terminal": refused("open('/dev/tty')"),
    "site-packages": refused("import os\nopen(os.path.dirname(os.__file__) + '/x.py', 'w')"),
    "the root folder": refused("open('/x', 'w')"),
    "a socket of the internet": refused("import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)"),
    "a datagram socket": refused("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)"),
    "a raw socket": refused("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    "a netlink socket": refused("import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    "a packet socket": refused("import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    "ptrace": libc("c.ptrace(0, 0, 0, 0)"),
    "ptrace of the parent": libc("c.ptrace(16, __import__('os').getppid(), 0, 0)"),
    "new namespaces": libc("c.unshare(0x10000000)"),
    "a mount": libc("c.mount(b'none', b'/tmp', b'tmpfs', 0, None)"),
    "a new root": libc("c.chroot(b'/tmp')"),
    "a device": refused("import os\nos.mknod('d', 0o20666, os.makedev(1, 1))"),
    "a key ring": libc("c.syscall(248, b'user', b'a', b'b', 1, -4)"),
    "shared memory that outlives": libc("c.shmget(1234, 4096, 0o1666)"),
    "semaphores that outlive": libc("c.semget(1234, 1, 0o1666)"),
    "messages that outlive": libc("c.msgget(1234, 0o1666)"),
    "io_uring": libc("c.syscall(425, 1, 0)"),
    "a program for the kernel": libc("c.syscall(321, 0, 0, 0)"),
    "counters of the processor": libc("c.syscall(298, 0, 0, -1, -1, 0)"),
    "user faults": libc("c.syscall(323, 0)"),
    "the log of the kernel": libc("c.klogctl(3, c.malloc(10), 10)"),
    "a swap file": libc("c.swapon(b'x', 0)"),
    "another personality": libc("c.personality(0x0400000)"),
    "the clock": refused("import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)"),
    "the name of the host": refused("import socket\nsocket.sethostname('x')"),
    "root": refused("import os\nos.setuid(0)"),
    "another group": refused("import os\nos.setgroups([0])"),
    "ends the keeper": refused("import os\nos.kill(os.getppid(), 9)\nassert os.getppid() != 1"),
    "stops the keeper": refused("import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nassert os.getppid() != 1"),
    "limits the keeper": refused("import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))"),
    "slows the keeper": refused("import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)"),
    "moves the keeper": refused("import os\nos.sched_setaffinity(os.getppid(), {0})"),
    "ends everybody": ends("import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nprint('here')",
                           frozenset({OK, KILLED})),
    "a file of the host's that anybody may write": refused("open('/var/tmp/rstar2-stray', 'w')"),
    "the way up out of the folder": refused("open('../../../../var/tmp/rstar2-stray', 'w')"),
}  # fmt: skip

REMAINS = {
    "a child that holds the output": ends("import os, time\nif os.fork() == 0:\n  time.sleep(60)\nprint('done')",
                                          stdout="done\n"),
    "a daemon": ends("import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
                     "    while True: time.sleep(1)\n  os._exit(0)\nprint('parent')", stdout="parent\n"),
    "a daemon without outputs": ends("import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n"
                                     "    for fd in range(3): os.close(fd)\n    while True: time.sleep(1)\n"
                                     "  os._exit(0)\nprint('parent')", stdout="parent\n"),
    "a stopped child": ends("import os, signal\npid = os.fork()\nif pid == 0:\n  os.kill(os.getpid(), signal.SIGSTOP)\n"
                            "os.waitpid(pid, os.WUNTRACED)\nprint('left')", stdout="left\n"),
    "a daemon thread": ends("import threading, time\n"
                            "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint(1)",
                            stdout="1\n"),
    "odd files": ends("import os\nos.symlink('/etc', 'link')\nos.mkfifo('fifo')\nopen('-rf', 'w').close()\n"
                      "open('a\\nb', 'w').close()\nopen(b'\\xff\\xfe', 'w').close()\nprint(1)", stdout="1\n"),
    "a socket file": ends("import socket\nsocket.socket(socket.AF_UNIX).bind('s')\nprint(1)", stdout="1\n",
                          namespaces_only=True),
    "deep folders": ends("import os\nfor _ in range(1500):\n  os.mkdir('d'); os.chdir('d')\nprint(1)",
                         frozenset({OK, FLOOD})),
    "folders that are closed": ends("import os\nos.makedirs('a/b')\nos.chmod('a/b', 0)\nos.chmod('a', 0)\nprint(1)",
                                    stdout="1\n"),
    "files swapped under way": ends(
        "import os\nfor i in range(200):\n  open(f't{i}', 'w').close(); os.symlink('/etc', 'n')\n"
        "  os.replace('n', f't{i}')\nprint(1)", stdout="1\n"),
    "poisoned modules": ends("import builtins, math, sys\nmath.pi = 3\nsys.modules['json'] = None\n"
                             "builtins.print = None", OK),
    "poisoned builtins": ends("import builtins\nfor name in list(vars(builtins)): setattr(builtins, name, None)",
                              BOUNDED),
    "poisoned class": ends("import fractions\nfractions.Fraction.__init__ = None\nprint(1)", stdout="1\n"),
    "a trace of every line": ends(
        "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\nprint(1)", stdout="1\n"),
    "odd bytes": ends(r"import os; _ = os.write(1, b'\xff\xfe \x00 \x1b[31m');", stdout="\ufffd\ufffd \x00 \x1b[31m"),
    "half characters": ends("print('\\ud800|')", stdout="\\ud800|\n"),
    "a dump of memory on the disk": ends("import os\nos.abort()", KILLED),
}  # fmt: skip

CASES = ENDINGS | HANGS | AMOUNTS | REACHES | REMAINS
