"""Publish and update of a 1 B-parameter model in bfloat16 between two processes: python benchmarks/publish.py [--json].

This process holds the parameters and publishes them; a second one does with each version what a server's rank does
(sglang_loader.py): it opens the version, reads all of it into the staging memory of the time before (chunks.Reader,
chunks.Memory), and once every checksum is proved copies it over the weights in use, with a thread for each core as
torch does.

After each repetition comes the raw one, in the same processes and folder: one thread writes as many bytes to a new
plain file and deletes the one before as the store does, and one thread reads the file into memory that holds all of it,
neither side synced: what the machine gives without a store. Just before either side writes, as much memory is taken
and freed: where the host of a virtual machine takes back what has been free for a second or two, new file pages would
cost the one side, by chance, up to four times what they cost the other. Printed are medians of the rates, of CPU
seconds (which say more on a machine that others use as well), their ratios, and the resident memory of both processes,
which must stay flat.

    --parameters N    instead of 1e9        --repetitions N    instead of 20
    --folder DIR      instead of a temporary one; needs room for three copies of the parameters
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from rstar2_jax.weights import chunks, manifest

PIECE_BYTES = 64 * 2**20


def resident_bytes() -> int:
    """Memory of this process that is not file cache."""
    fields = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def cpu_seconds() -> float:
    """CPU time of this process, its threads included."""
    return time.process_time()


def take_and_free(total: int) -> None:
    """Leave so many bytes of free memory behind that this machine has at hand."""
    np.ones(total, np.uint8)


def raw_read(path: pathlib.Path, memory: np.ndarray) -> dict[str, float]:
    """Seconds, and of them CPU's, to read a plain file into memory that was used before."""
    start, cpu, at = time.perf_counter(), cpu_seconds(), 0
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(memory.data[at : at + PIECE_BYTES]):
            at += got
    return {"raw": time.perf_counter() - start, "raw_cpu": cpu_seconds() - cpu}


def raw_write(path: pathlib.Path, total: int, buffer: np.ndarray) -> dict[str, float]:
    """Seconds, and of them CPU's, to write as many bytes into a new plain file and delete the one before."""
    start, cpu = time.perf_counter(), cpu_seconds()
    fresh = path.with_suffix(".new")
    with fresh.open("wb", buffering=0) as file:
        for at in range(0, total, len(buffer)):
            file.write(buffer.data[: min(len(buffer), total - at)])
    fresh.replace(path)
    return {"raw_write": time.perf_counter() - start, "raw_write_cpu": cpu_seconds() - cpu}


def copy_over(held: dict[str, np.ndarray], staged: dict[str, np.ndarray]) -> None:
    """What a rank does with its staged slices on a CPU; torch's own copy uses every core as well."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda name: np.copyto(held[name], staged[name]), staged))


def update(folder: pathlib.Path, memory: chunks.Memory, held: dict[str, np.ndarray]) -> dict[str, float]:
    """A rank's update; seconds, and of them CPU's, for it and up to the last proof."""
    start, cpu = time.perf_counter(), cpu_seconds()
    opened = chunks.Reader(folder, manifest.read(folder))
    boxes = [(name, manifest.whole(entry.shape)) for name, entry in opened.manifest.tensors.items()]
    staged = {name: array for name, _, array in opened.read(boxes, memory)}
    proved = time.perf_counter() - start
    if not held:
        held |= {name: np.ones_like(array) for name, array in staged.items()}
    copy_over(held, staged)
    return {"seconds": time.perf_counter() - start, "proved": proved, "cpu": cpu_seconds() - cpu}


def reader(root: str) -> None:
    """The second process: one line in for each update or raw read, one line out of what it took."""
    held: dict[str, np.ndarray] = {}
    memory, plain = chunks.Memory(), np.ones(0, np.uint8)
    for line in sys.stdin:
        kind, what = line.split()
        if kind == "update":
            said = update(manifest.version_folder(root, int(what)), memory, held)
        else:
            if not plain.size:
                plain = np.ones(pathlib.Path(what).stat().st_size, np.uint8)
            said = raw_read(pathlib.Path(what), plain)
        print(json.dumps(said | {"resident": resident_bytes()}), flush=True)


def sized(parameters: float):
    """A Qwen3 of about so many parameters."""
    from rstar2_jax.settings import Model

    layers = max(1, round((parameters - 65536 * 2048) / (2048 * (4096 + 2048 * 2) + 3 * 2048 * 6144)))
    sizes = {"vocab_size": 65536, "d_model": 2048, "d_mlp": 6144, "layers": layers}
    return Model(family="qwen3", heads=16, kv_heads=8, head_dim=128, max_positions=4096, **sizes)


def measure(arguments: argparse.Namespace, folder: pathlib.Path) -> dict:
    """All repetitions; the first is not counted."""
    import jax
    import jax.numpy as jnp

    from rstar2_jax.model import decoder
    from rstar2_jax.weights import publish

    model = sized(arguments.parameters)
    shapes = decoder.abstract_params(model)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))
    params = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape, jnp.bfloat16), shapes)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    buffer = np.random.default_rng(0).integers(0, 256, PIECE_BYTES, np.uint8)
    root, plain = folder / "store", folder / "plain"
    command = [sys.executable, __file__, "--reader", str(root)]
    rows = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        for version in range(arguments.repetitions + 1):
            take_and_free(2 * count)
            start, cpu = time.perf_counter(), cpu_seconds()
            publish.publish(params, model, root, version, dtype="bfloat16", keep=1)
            row = {"publish": time.perf_counter() - start, "publish_cpu": cpu_seconds() - cpu}
            row["read"] = asked(child, f"update {version}")
            take_and_free(2 * count)
            row |= raw_write(plain, 2 * count, buffer)
            row["read"] |= asked(child, f"raw {plain}")
            row["resident"] = resident_bytes()
            rows.append(row)
            print(f"{version}: {row}", file=sys.stderr)
        child.communicate()
    return summary(count, rows[1:])


def asked(child: subprocess.Popen[str], line: str) -> dict[str, float]:
    """What the second process answers."""
    assert child.stdin and child.stdout
    child.stdin.write(f"{line}\n")
    child.stdin.flush()
    return json.loads(child.stdout.readline())


def summary(count: int, rows: list[dict]) -> dict:
    """Medians in GB/s, ratios, memory at the first and the last repetition."""
    gigabytes = 2 * count / 1e9

    def median(values):
        return round(statistics.median(values), 3)

    def spread(values):
        values = [round(v / 2**20) for v in values]
        return {"first_mib": values[0], "last_mib": values[-1], "least_mib": min(values), "most_mib": max(values)}

    return {
        "parameters": count,
        "gigabytes": round(gigabytes, 3),
        "repetitions": len(rows),
        "publish_gb_per_s": median(gigabytes / r["publish"] for r in rows),
        "raw_write_gb_per_s": median(gigabytes / r["raw_write"] for r in rows),
        "publish_to_raw": median(r["raw_write"] / r["publish"] for r in rows),
        "update_gb_per_s": median(gigabytes / r["read"]["seconds"] for r in rows),
        "raw_read_gb_per_s": median(gigabytes / r["read"]["raw"] for r in rows),
        "proved_gb_per_s": median(gigabytes / r["read"]["proved"] for r in rows),
        "update_to_raw": median(r["read"]["raw"] / r["read"]["seconds"] for r in rows),
        "both_to_raw": median(
            (r["raw_write"] + r["read"]["raw"]) / (r["publish"] + r["read"]["seconds"]) for r in rows
        ),
        "publish_cpu_s": median(r["publish_cpu"] for r in rows),
        "raw_write_cpu_s": median(r["raw_write_cpu"] for r in rows),
        "update_cpu_s": median(r["read"]["cpu"] for r in rows),
        "raw_read_cpu_s": median(r["read"]["raw_cpu"] for r in rows),
        "both_to_raw_cpu": median(
            (r["raw_write_cpu"] + r["read"]["raw_cpu"]) / (r["publish_cpu"] + r["read"]["cpu"]) for r in rows
        ),
        "publisher_memory": spread([r["resident"] for r in rows]),
        "reader_memory": spread([r["read"]["resident"] for r in rows]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.reader:
        reader(arguments.reader)
        return
    folder = pathlib.Path(tempfile.mkdtemp(prefix="publish-", dir=arguments.folder))
    try:
        result = measure(arguments, folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result) if arguments.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
