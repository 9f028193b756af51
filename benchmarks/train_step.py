"""Trained tokens per CPU-second of a GRPO step, beside tunix and Hugging Face: python benchmarks/train_step.py [--json]

A Qwen3 of 9.7 million parameters, float32, one core. `full`: 16 sequences of 64 prompt and 128 response tokens.
`ragged`: 64 sequences whose prompts and responses average a quarter of that; packed here into 16 rows of 208 tokens,
padded by the others to 64 of 192.
Each contestant computes the clipped policy loss against given old log-probabilities and takes one AdamW step with the
gradient clipped. They take turns, each in its own process and environment (benchmarks/peers.sh builds those).

    --peers FOLDER   where the environments are (default .venv-peers)
    --load NAME      full, ragged or both (default both)
    --rounds N       turns of each contestant (default 7)
    --steps N        steps of a turn (default 3)
    --remat POLICY   what ours keeps of its layers (default none, which is everything)
    --json           print one JSON object instead of a table
    --microbatch_rows N  how many of its 16 rows ours takes at once (default 8; the others take 16 sequences)
    --only NAME      one contestant alone, with its errors shown (ours, tunix, torch)
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import paired  # noqa: E402 (found beside this file)


def contestants(peers: pathlib.Path) -> dict[str, list[str]]:
    """Command lines by name."""
    return {
        "ours": [sys.executable, str(HERE / "step_ours.py")],
        "tunix": [str(peers / "tunix" / "bin" / "python"), str(HERE / "step_tunix.py")],
        "torch": [str(peers / "torch" / "bin" / "python"), str(HERE / "step_torch.py")],
    }


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--peers", type=pathlib.Path, default=HERE.parent / ".venv-peers")
    options.add_argument("--load", choices=["full", "ragged", "both"], default="both")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--remat", default="none")
    options.add_argument("--microbatch_rows", type=int, default=8)
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", choices=["ours", "tunix", "torch"])
    asked = options.parse_args()
    running = contestants(asked.peers)
    if asked.only:
        running = {asked.only: running[asked.only]}
    memory = paired.keeping_all()
    print("memory of every contestant:", memory, file=sys.stderr)
    found = {}
    for load in ["full", "ragged"] if asked.load == "both" else [asked.load]:
        task = {"load": load, "steps": asked.steps, "remat": asked.remat, "quiet": not asked.only}
        task["microbatch_rows"] = asked.microbatch_rows
        results = paired.measure(running, task, asked.rounds, lambda line: print(line, file=sys.stderr), memory)
        found[load] = {
            r.name: {"median": r.median, "rates": r.rates, "peak_bytes": r.peak_bytes, "idle_bytes": r.idle_bytes}
            | r.told
            for r in results
        }
        if not asked.json:
            print("\n".join(paired.table(load, "trained tokens", results)))
    if asked.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
