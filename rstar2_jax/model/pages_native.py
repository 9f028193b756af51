"""A step of attention over pages on CPUs: pages_native.c behind XLA's foreign function interface.

What XLA makes of pages.py copies every page before it reads it, which takes three times as long as the reading does,
and then sums with a loop of its own for each product. The part in C reads pages where they lie.

It is compiled where it is used, for the processor at hand, and kept in the cache folder that compiled programs are in.
Without a compiler nothing is lost but speed: pages.py computes the same, and the log says so once.
"""

from __future__ import annotations

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

import jax
from jaxtyping import Array, Float, Int

_LOG = logging.getLogger(__name__)
_NAME = "rstar2_pages_step"
_SOURCE = pathlib.Path(__file__).with_name("pages_native.c")
_WIDE = ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
_FLAGS = ["-O3", "-march=native", *_WIDE, "-ffp-contract=fast", "-shared", "-fPIC"]


def available() -> bool:
    """Whether arrays of this process lie on CPUs and the part in C is there, compiled now if it never was."""
    return jax.default_backend() == "cpu" and _registered()


def step(
    q: Float[Array, "b h d"],
    keys: Float[Array, "n k d p"],
    values: Float[Array, "n k p d"],
    new_keys: Float[Array, "b k d"],
    new_values: Float[Array, "b k d"],
    positions: Int[Array, " b"],
    tables: Int[Array, "b t"],
) -> tuple[Float[Array, "b h d"], Float[Array, "n k d p"], Float[Array, "n k p d"]]:
    """(attention, keys, values) as pages.write and then pages.attention give them, one dtype throughout.

    A row with a negative position writes nothing and gets zeros. An error of the runtime names a table that points
    outside the pool or a position beyond its table.
    """
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, keys, values)]
    call = jax.ffi.ffi_call(_NAME, results, input_output_aliases={1: 1, 2: 2})
    out, keys, values = call(q, keys, values, new_keys, new_values, positions, tables)
    return out, keys, values


def build(folder: pathlib.Path) -> pathlib.Path:
    """The compiled part in a folder, compiled unless that was done for this processor, compiler and jaxlib.

    Its name holds a digest of its content: to load a file that was cut short would kill the process.

    Raises:
        OSError: there is no compiler, or it fails, or the folder cannot be written.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler was found (Debian: apt-get install gcc libc6-dev)")
    include = pathlib.Path(jax.ffi.include_dir())
    made_of = [_SOURCE.read_bytes(), (include / "xla/ffi/api/c_api.h").read_bytes(), repr(_FLAGS).encode()]
    made_of += [os.path.realpath(compiler).encode(), _processor().encode()]
    name = f"pages-{_digest(b'|'.join(made_of))}"
    for found in folder.glob(f"{name}-*.so"):
        if found.name == f"{name}-{_digest(found.read_bytes())}.so":
            return found
        found.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = pathlib.Path(scratch) / "made.so"
        command = [compiler, *_FLAGS, f"-I{include}", "-o", str(made), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise OSError(f"{compiler} cannot compile {_SOURCE.name}: {done.stderr.strip()[-400:]}")
        target = folder / f"{name}-{_digest(made.read_bytes())}.so"
        made.replace(target)
    return target


@functools.cache
def _registered() -> bool:
    try:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        handler = getattr(ctypes.CDLL(str(build(cache / "rstar2_jax" / "native"))), _NAME)
    except (OSError, AttributeError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: no home
        _LOG.warning("attention over pages runs without its part in C, at about half the speed: %s", error)
        return False
    jax.ffi.register_ffi_target(_NAME, jax.ffi.pycapsule(handler), platform="cpu")
    return True


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
