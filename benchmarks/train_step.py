"""Trained tokens per CPU-second of a GRPO step, beside tunix and Hugging Face: python benchmarks/train_step.py [--json]

A Qwen3 of 9.7 million parameters, float32, one core. `full`: 16 sequences of 64 prompt and 128 response tokens.
`ragged`: 64 sequences whose prompts and responses average a quarter of that; packed here, padded by the others.
Each contestant computes the clipped policy loss against given old log-probabilities and takes one AdamW step with the
gradient clipped. They take turns, each in its own process and environment (benchmarks/peers.sh builds those).

    --peers FOLDER   where the environments are (default .venv-peers)
    --load NAME      full, ragged or both (default both)
    --rounds N       turns of each contestant (default 7)
    --json           print one JSON object instead of a table
    --only NAME      one contestant alone, with its errors shown (ours, tunix, torch)
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import paired  # noqa: E402 (found beside this file)
import step_task  # noqa: E402


def contestants(peers: pathlib.Path) -> dict[str, list[str]]:
    """Command lines by name."""
    return {
        "ours": [sys.executable, str(HERE / "train_step.py"), "--serve"],
        "tunix": [str(peers / "tunix" / "bin" / "python"), str(HERE / "step_tunix.py")],
        "torch": [str(peers / "torch" / "bin" / "python"), str(HERE / "step_torch.py")],
    }


def prepare(task: dict[str, Any]) -> Any:
    """Our contestant: the learner's own update over packed rows."""
    import jax

    from rstar2_jax import settings
    from rstar2_jax.data import pack
    from rstar2_jax.learner import batch, objective, update
    from rstar2_jax.model import decoder

    sequences = step_task.sequences(task["load"])
    model = settings.Model(**step_task.SIZES, family="qwen3", tie_embeddings=True, max_positions=step_task.TOKENS)
    learner = settings.Learner(
        optimizer=settings.Optimizer(lr=step_task.LR, warmup_steps=0, weight_decay=0.01, max_grad_norm=1.0),
        microbatch_rows=16,
        row_tokens=step_task.TOKENS,
        remat=task.get("remat", "none"),
    )
    trainer = update.Learner(model, learner, objective.grpo(learner.loss), total_steps=1000)
    rows = [
        pack.Row(token_ids=s.ids, mask=s.mask, behavior_logprobs=s.old_logprobs, advantage=s.advantage)
        for s in sequences
    ]
    whole = pack.pack(rows, row_tokens=step_task.TOKENS, rows_multiple=16)
    parts, trained = batch.cut(whole, 16), float(whole.loss_mask.sum())
    anchors = [objective.Anchors(old_logprobs=part.behavior_logprobs) for part in parts]
    held = {"state": trainer.create(decoder.init_params(model, jax.random.key(0)))}

    def work() -> float:
        for _ in range(task["steps"]):
            held["state"], told = trainer.update(held["state"], parts, trained, anchors)
        assert told["skipped"] == 0
        return trained * task["steps"]

    work()
    count = sum(leaf.size for leaf in jax.tree.leaves(held["state"].params))
    return work, {"parameters": count, "rows": len(parts) * 16, "padding": pack.waste(parts)}


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--peers", type=pathlib.Path, default=HERE.parent / ".venv-peers")
    options.add_argument("--load", choices=["full", "ragged", "both"], default="both")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--remat", default="none")
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", choices=["ours", "tunix", "torch"])
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.serve:
        paired.serve(prepare)
        return
    running = contestants(asked.peers)
    if asked.only:
        running = {asked.only: running[asked.only]}
    found = {}
    for load in ["full", "ragged"] if asked.load == "both" else [asked.load]:
        task = {"load": load, "steps": asked.steps, "remat": asked.remat, "quiet": not asked.only}
        results = paired.measure(running, task, asked.rounds, lambda line: print(line, file=sys.stderr))
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
