"""Engine processes of this package on this machine: started, named, and started again when they end.

Each is `python -m rstar2_jax.rollout.serve` on a loopback port that it keeps over restarts, and it ends with the
process that started it. One that runs and does not answer for long (stopped, wedged) is killed and started again. What
becomes of its rollouts is the pool's business.

Deliberately not here: servers on other machines; Slurm and Kubernetes keep those alive (launch/).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from rstar2_jax.io import limits
from rstar2_jax.rollout import sglang, watch
from rstar2_jax.rollout.engine import EngineError
from rstar2_jax.settings import Model

_START_S = 180.0  # imports and the first line on a busy machine
_LOOK_S = 2.0
_MOST_SILENT_S = 30.0
_MOST_RESTARTS = 20  # within the window: a fault that comes back each time is not mended by restarting
_WINDOW_S = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What each process is started with.

    Args:
        folder: for model.json and one log a replica.
        slots, context_tokens, prefill_chunk_tokens: of the engine.
    """

    folder: Path
    model: Model
    slots: int
    context_tokens: int
    prefill_chunk_tokens: int


class Restarts:
    """Counts restarts, and says when they come too often; rare ones never add up.

    Args:
        most: allowed within any window of `window_s` seconds.
    """

    def __init__(self, most: int, window_s: float) -> None:
        self._most, self._window_s = most, window_s
        self._recent: collections.deque[float] = collections.deque()
        self.total = 0

    def allowed(self, now_s: float) -> bool:
        """Whether one more may take place now; if so, it is counted."""
        while self._recent and now_s - self._recent[0] >= self._window_s:
            self._recent.popleft()
        if len(self._recent) >= self._most:
            return False
        self._recent.append(now_s)
        self.total += 1
        return True


class Replica:
    """One engine process, and its client.

    Args:
        plan: see Plan.
        name: of the replica; also of its log.
        report: receives one line for each end and each restart.
    """

    def __init__(self, plan: Plan, name: str, report: Callable[[str], None]) -> None:
        self._plan, self._name, self._report = plan, name, report
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0
        self._keeper: asyncio.Task[None] | None = None
        self._restarts = Restarts(_MOST_RESTARTS, _WINDOW_S)

    @property
    def restarts(self) -> int:
        """How often the process was started again."""
        return self._restarts.total

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> sglang.SglangEngine:
        """Start the process and connect to it; from then on it is kept alive.

        Raises:
            EngineError: it does not come up; names its log.
        """
        url = await self._launch()
        engine = await sglang.connect(url, self._plan.model, name=self._name, context_tokens=self._plan.context_tokens)
        self._keeper = asyncio.create_task(self._keep(engine))
        return engine

    async def stop(self) -> None:
        """End the process."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is not None:
            await _end(self._process)

    @property
    def _log(self) -> Path:
        return self._plan.folder / f"{self._name}.log"

    async def _launch(self) -> str:
        plan = self._plan
        sizes = {
            "model": plan.folder / "model.json",
            "slots": plan.slots,
            "context_tokens": plan.context_tokens,
            "prefill_chunk_tokens": plan.prefill_chunk_tokens,
            "port": self._port,
            "name": self._name,
            "parent": os.getpid(),
        }
        flags = [f"--{flag}={value}" for flag, value in sizes.items()]
        try:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "rstar2_jax.rollout.serve",
                    *flags,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    process_group=0,  # a Ctrl-C is for the trainer, which then ends its engines in order
                )
        except OSError as error:  # no memory, no file or no process left for it
            reason = limits.met_open_files(error) or error
            raise EngineError(f"engine process {self._name} cannot be started: {reason}") from error
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await self._process.stdout.readline()
            url = str(json.loads(line)["url"])
        except (TimeoutError, ValueError, KeyError) as error:
            await _end(self._process)
            raise EngineError(f"engine process {self._name} did not come up; its log: {self._log}") from error
        self._port = int(url.rpartition(":")[2])
        return url

    async def _keep(self, engine: sglang.SglangEngine) -> None:
        """Start the process again when it has ended, or has been silent for too long."""
        assert self._process is not None
        silent_s = 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._process.wait()
            if self._process.returncode is None:
                answers = await watch.answers(engine, _LOOK_S)
                silent_s = 0.0 if answers else silent_s + 2 * _LOOK_S
                if silent_s < _MOST_SILENT_S:
                    continue
                self._report(f"! engine process {self._name} is silent for {silent_s:.0f} s: killed")
                await _end(self._process, signal.SIGKILL)
            silent_s = 0.0
            if not self._restarts.allowed(asyncio.get_running_loop().time()):
                often = f"ended {_MOST_RESTARTS} times in {_WINDOW_S:.0f} s"
                self._report(f"! engine process {self._name} {often}: left alone; see {self._log}")
                return
            self._report(f"! engine process {self._name} ended ({self._process.returncode}): started again")
            try:
                await self._launch()
            except EngineError as error:
                self._report(f"! {error}")
                await asyncio.sleep(_LOOK_S)  # what it lacks may come back


@contextlib.asynccontextmanager
async def open_replicas(
    plan: Plan, count: int, report: Callable[[str], None]
) -> AsyncIterator[tuple[list[sglang.SglangEngine], list[Replica]]]:
    """(engines, their processes), all started at once and ended on every exit.

    Raises:
        EngineError: one of them does not come up.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    (plan.folder / "model.json").write_text(json.dumps(dataclasses.asdict(plan.model)))
    replicas = [Replica(plan, f"engine-{number}", report) for number in range(count)]
    try:
        started = await asyncio.gather(*(replica.start() for replica in replicas), return_exceptions=True)
        engines = [outcome for outcome in started if isinstance(outcome, sglang.SglangEngine)]
        for outcome in started:
            if isinstance(outcome, BaseException):
                await asyncio.gather(*(engine.close() for engine in engines))
                raise outcome
        yield engines, replicas
    finally:
        await asyncio.gather(*(replica.stop() for replica in replicas))


async def _end(process: asyncio.subprocess.Process, number: signal.Signals = signal.SIGTERM) -> None:
    """Ask a process to end, and make it end where it does not within ten seconds."""
    for chosen in (number, signal.SIGKILL):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(chosen)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    await process.wait()
