"""Session-wide set-up: eight virtual CPU devices before JAX is imported, type hooks on the pure rooms."""

from __future__ import annotations

import importlib.metadata
import os

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Tests are many small programs: compiling them is most of the suite's time, and with these it takes a third of
        # it. Child processes get the defaults, unless a test says otherwise.
        "--xla_backend_optimization_level=0",
        # Programs of jaxlib 0.12 that were compiled without its fusion emitters crash.
        "--xla_cpu_use_fusion_emitters=false" if importlib.metadata.version("jaxlib") < "0.11" else "",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Engines are built anew and runs are started again all over the suite: each of its processes keeps what it compiled, in
# a folder of its own, since entries are not written atomically.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"),
        "rstar2_jax/xla-tests",
        os.environ.get("PYTEST_XDIST_WORKER", "main"),
    ),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jaxtyping

# Shapes and dtypes of the pure rooms are checked at every call under pytest only; never on types.py, whose pytree
# classes would break under tree.map, vmap and scan.
jaxtyping.install_import_hook(["rstar2_jax.algo", "rstar2_jax.learner"], "beartype.beartype")


def pytest_collection_modifyitems(items):
    """Spread the files of tests/sandbox over the others: these compile while those wait.

    Without it the two processes of the suite end on such files both, and half of the machine waits with them.
    """
    order = list(dict.fromkeys(item.path for item in items))
    waiting = [path for path in order if path.parent.name == "sandbox"]
    busy = [path for path in order if path.parent.name != "sandbox"]
    places = {path: (place + 0.5) / len(paths) for paths in (waiting, busy) for place, path in enumerate(paths)}
    early = {path for path in busy if path.parent.name == "e2e"}  # these take minutes: none of them is the last
    items.sort(key=lambda item: (item.path not in early, places[item.path]))
