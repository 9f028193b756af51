"""Parts in C on CPUs: compiled where they are used, for the processor at hand, and registered with XLA.

They are kept in the cache folder that compiled programs are in. Without a compiler nothing is lost but speed: whoever
has a part in C has a portable form as well, and the log says once that it is used.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator

import jax

_LOG = logging.getLogger(__name__)
_FOLDER = pathlib.Path(__file__).parent
_WIDE = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
_FLAGS = ["-O3", "-march=native", *_WIDE, "-ffp-contract=fast", "-shared", "-fPIC"]
_LOCK = threading.Lock()
_UNUSED = contextvars.ContextVar("_UNUSED", default=False)


def available(source: str, names: tuple[str, ...], loss: str) -> bool:
    """Whether arrays of this process lie on CPUs and a part in C is there, compiled now if it never was.

    Args:
        source: file beside this one.
        names: its functions that XLA may call.
        loss: what the log says once where the part is not there.
    """
    if jax.default_backend() != "cpu" or _UNUSED.get():
        return False
    with _LOCK:  # a cache lets two threads in that are first at the same time
        return registered(source, names, loss)


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Programs that are traced inside have the portable forms alone, as on another machine."""
    before = _UNUSED.set(True)
    try:
        yield
    finally:
        _UNUSED.reset(before)


@functools.cache
def registered(source: str, names: tuple[str, ...], loss: str) -> bool:
    """Whether the functions of a part in C are known to XLA; arguments as in `available`."""
    try:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        library = ctypes.CDLL(str(build(source, cache / "rstar2_jax" / "native")))
        handlers = [getattr(library, name) for name in names]
    except (OSError, AttributeError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: no home
        _LOG.warning("%s: %s", loss, error)
        return False
    for name, handler in zip(names, handlers, strict=True):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return True


def build(source: str, folder: pathlib.Path) -> pathlib.Path:
    """The compiled part in a folder, compiled unless that was done for this processor, compiler and jaxlib.

    Its name holds a digest of its content: to load a file that was cut short would kill the process.

    Raises:
        OSError: there is no compiler, or it fails, or the folder cannot be written.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler was found (Debian: apt-get install gcc libc6-dev)")
    include = pathlib.Path(jax.ffi.include_dir())
    read = [_FOLDER / source, _FOLDER / "native.h", include / "xla/ffi/api/c_api.h"]
    made_of = [*(path.read_bytes() for path in read), repr(_FLAGS).encode()]
    made_of += [os.path.realpath(compiler).encode(), _processor().encode()]
    name = f"{pathlib.Path(source).stem}-{_digest(b'|'.join(made_of))}"
    for found in folder.glob(f"{name}-*.so"):
        if found.name == f"{name}-{_digest(found.read_bytes())}.so":
            return found
        found.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = pathlib.Path(scratch) / "made.so"
        command = [compiler, *_FLAGS, f"-I{include}", "-o", str(made), str(_FOLDER / source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise OSError(f"{compiler} cannot compile {source}: {done.stderr.strip()[-400:]}")
        target = folder / f"{name}-{_digest(made.read_bytes())}.so"
        made.replace(target)
    return target


def _processor() -> str:
    """What the machine's code is made for: another host that shares the folder may have another processor."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    found = {line.partition(":")[0].strip(): line for line in lines}
    return platform.machine() + "".join(found.get(name, "") for name in ("model name", "flags", "Features"))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
