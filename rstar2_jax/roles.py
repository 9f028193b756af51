"""The processes of a run and their command lines: what `--dry_run` prints, and what launch/ starts.

A run without servers elsewhere is one process. With them it is

    sandbox master   Redis and the queue's keeper             one, on a node with a stable address
    sandbox worker   executions on CPU cores                  one on every node
    rollout          an SGLang server on its GPUs             one for each address of Fleet.engines
    trainer          this program                             one on every node with GPUs of the learner's mesh

A run without a learner whose engines are servers, and an export, need no device of their own: their whole model lies
in the memory of one host, in float32, and goes from there into the weight store or the exported folder. On a device it
would have to fit beside a server (a 14B model takes 59 GB); JAX_PLATFORMS=cpu keeps it off.

Pure. Deliberately not here: starting anything (launch/).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rstar2_jax import settings

GPUS_OF_A_NODE = 8
# SGLang and the trainer share each GPU: of 192 GB the one takes weights and cache, the other what plan.py says.
SGLANG_MEMORY_SHARE = 0.45
TRAINER_MEMORY_SHARE = 0.45


def lines(arguments: Mapping[str, Any], flags: Sequence[str]) -> list[str]:
    """One block a role: how many, on which nodes, and its command line.

    Args:
        arguments: of the RUN function.
        flags: of the command line, program name left out.
    """
    rollout, sandbox = _rooms(arguments)
    model = arguments.get("model")
    own = shlex.join(["python", "-m", "rstar2_jax.launch", *(flag for flag in flags if flag != "--dry_run")])
    blocks = [] if sandbox is None else _sandbox(sandbox)
    if rollout is not None and model is not None:
        blocks += _rollout(rollout, model, arguments["task"])
    processes = _processes(arguments)
    joined = "JAX_PLATFORMS=cpu " if _on_host(arguments) else ""
    if processes > 1:
        joined += (
            f"JAX_COORDINATOR_ADDRESS=NODE_0:8476 JAX_NUM_PROCESSES={processes} JAX_PROCESS_ID=0..{processes - 1} "
        )
    shared = rollout is not None and bool(rollout.fleet.engines)
    memory = f"XLA_PYTHON_CLIENT_MEM_FRACTION={TRAINER_MEMORY_SHARE} " if shared and not _on_host(arguments) else ""
    blocks.append((f"trainer x {processes}, one on each node of its mesh", joined + memory + own))
    return ["", "roles:", *(f"  {title}\n    {command}" for title, command in blocks)]


def facts(arguments: Mapping[str, Any]) -> list[str]:
    """What launch/ must know of a run before it starts its processes, as lines that a shell evaluates.

    PROCESSES of the trainer; PLATFORM, empty or what JAX_PLATFORMS must be; MEMORY_SHARE, empty or the trainer's share
    of each GPU; SERVERS, addresses of engines, or 0; SERVER_FLAGS of each but its port; SANDBOX, 1 where tools are
    called.

    Args:
        arguments: of the RUN function.
    """
    rollout, sandbox = _rooms(arguments)
    servers = rollout is not None and bool(rollout.fleet.engines)
    flags = _server_flags(rollout, arguments["model"], arguments["task"]) if rollout and servers else []
    found = {
        "PROCESSES": _processes(arguments),
        "PLATFORM": "cpu" if _on_host(arguments) else "",
        "MEMORY_SHARE": TRAINER_MEMORY_SHARE if servers and not _on_host(arguments) else "",
        "SERVERS": len(rollout.fleet.addresses) if rollout and servers else 0,
        "SERVER_FLAGS": " ".join(flags),
        "SANDBOX": int(sandbox is not None),
    }
    return [f"{name}={shlex.quote(str(value))}" for name, value in found.items()]


def _rooms(arguments: Mapping[str, Any]) -> tuple[settings.Rollout | None, settings.Sandbox | None]:
    """The run's rollout and sandbox, as far as it makes use of them: curation by text alone asks nobody."""
    curation = arguments.get("curation")
    if curation is not None and not curation.samples:
        return None, None
    return arguments.get("rollout"), arguments.get("sandbox")


def _processes(arguments: Mapping[str, Any]) -> int:
    learner = arguments.get("learner")
    return 1 if learner is None else max(1, math.prod(learner.mesh) // GPUS_OF_A_NODE)


def _on_host(arguments: Mapping[str, Any]) -> bool:
    """Whether the run's own process does without a device: no learner in it, and no engine."""
    rollout = _rooms(arguments)[0]
    return (
        "model" in arguments and arguments.get("learner") is None and (rollout is None or bool(rollout.fleet.engines))
    )


def _sandbox(sandbox: settings.Sandbox) -> list[tuple[str, str]]:
    if not sandbox.redis_url:
        return [(f"sandbox, started by the trainer: a private Redis and one worker, {sandbox.slots} slots", "-")]
    where = urlsplit(sandbox.redis_url)
    port = where.port or 6379
    worker = f"RSTAR2_SANDBOX_REDIS_URL={sandbox.redis_url} python -m rstar2_sandbox worker --slots CORES"
    return [
        (f"sandbox master x 1, on {where.hostname}", f"python -m rstar2_sandbox master --port {port}"),
        ("sandbox worker, one on every node", worker),
    ]


def _rollout(rollout: settings.Rollout, model: settings.Model, task: settings.Task) -> list[tuple[str, str]]:
    fleet = rollout.fleet
    if not fleet.engines:
        what = f"{fleet.replicas} engine processes" if fleet.replicas else "one embedded engine"
        return [(f"rollout, inside the trainer's process group: {what}", "-")]
    ports = sorted({urlsplit(address).port or 80 for address in fleet.addresses})
    hosts = {urlsplit(address).hostname for address in fleet.addresses}
    command = [
        "python -m sglang.launch_server",
        *_server_flags(rollout, model, task),
        f"--port {ports[0]}" + (f"..{ports[-1]}" if len(ports) > 1 else ""),
    ]
    title = f"rollout x {len(fleet.addresses)}, on {len(hosts)} hosts, {fleet.tensor_parallel} GPUs each"
    return [(title, " ".join(command))]


def _server_flags(rollout: settings.Rollout, model: settings.Model, task: settings.Task) -> list[str]:
    """Of an SGLang server of the run, all but its port."""
    return [
        f"--model-path {shlex.quote(task.tokenizer)}",
        "--load-format dummy",  # the first weights come from the trainer, as it computes with them
        f"--dtype {rollout.fleet.published_dtype(model.compute_dtype)}",
        f"--tp-size {rollout.fleet.tensor_parallel}",
        f"--context-length {min(model.max_positions, rollout.max_prompt_tokens + rollout.max_response_tokens + 1)}",
        f"--mem-fraction-static {SGLANG_MEMORY_SHARE}",
        "--host 0.0.0.0",
    ]
