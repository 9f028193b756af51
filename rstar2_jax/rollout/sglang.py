"""A rollout engine behind HTTP: an SGLang server (0.5.15 to 0.5.23) or this package's own (serve.py), reached alike.

What a stock server would let pass is guarded here: ids are checked before they are sent (one beyond the vocabulary ends
the server), an update goes to a server that is paused, is believed only when the server reports the new version, and is
followed by `continue` in a `finally`; liveness never asks `/health`, which hangs while paused. A server whose update
ended neither in success nor in a refusal holds unknown weights: it samples nothing more until an update succeeds.

Weights go by reference: the server reads the version folder of the store through our plug-in,
weights/sglang_loader.py. Every fault on the way is an EngineError that names what was awaited. Nothing is sent twice:
to send a turn again is the business of whoever knows whether it may run twice.

Deliberately not here: the choice among several engines, starting and replacing servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import aiohttp
import numpy as np

from rstar2_jax.rollout import sglang_call
from rstar2_jax.rollout import sglang_wire as wire
from rstar2_jax.rollout.engine import (
    DIVERGED,
    Caps,
    DivergedError,
    EngineError,
    Generation,
    LimitError,
    Load,
    PauseMode,
    Request,
    checked_mode,
    checked_request,
    checked_text,
)
from rstar2_jax.settings import Model
from rstar2_jax.types import FinishReason
from rstar2_jax.weights import fetch, manifest

_LOG = logging.getLogger(__name__)
_POLL_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long the client waits, in seconds: for a connection, a probe, a control call, an update, one turn."""

    connect_s: float = 10.0
    probe_s: float = 10.0
    control_s: float = 120.0
    update_s: float = 900.0
    turn_s: float = 7200.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """What a server turned out to be able to do: its release, and whether it reads our weight store."""

    release: str
    plugin: bool


async def connect(
    url: str, model: Model, *, name: str = "", deadlines: Deadlines = Deadlines(), context_tokens: int | None = None
) -> SglangEngine:
    """The engine at `url`, probed.

    Args:
        url: `http://host:port`, no path.
        model: sizes of the decoder that the server was started with.
        name: of the replica; the url where it is empty.
        context_tokens: longest prompt plus response, where it is to be less than the server's own.

    Raises:
        EngineError: nothing answers there, or another model does.
    """
    engine = SglangEngine(url, model, name=name, deadlines=deadlines)
    try:
        await engine.probe(context_tokens)
    except BaseException:
        await engine.close()
        raise
    return engine


class SglangEngine:
    """A RolloutEngine reached over HTTP; `connect` makes it."""

    def __init__(self, url: str, model: Model, *, name: str = "", deadlines: Deadlines = Deadlines()) -> None:
        self._url, self._model, self._name, self._deadlines = url.rstrip("/"), model, name or url, deadlines
        self._caps: Caps | None = None
        self._features = Features(release="", plugin=False)
        self._version, self._epoch = -1, 0
        self._unknown = ""  # why the weights of the server are unknown; empty while they are known
        self._paused = False  # by whoever uses this engine, not by an update
        self._running: dict[str, str] = {}  # rid of a request in flight -> its name on the wire
        self._ended = asyncio.Event()  # set whenever no request is in flight
        self._ended.set()
        self._background: set[asyncio.Task[None]] = set()
        self._update_lock = asyncio.Lock()
        self._closed = False
        self._session = sglang_call.open_session()

    @property
    def caps(self) -> Caps:
        """What the server said that it holds."""
        if self._caps is None:
            raise EngineError(f"{self._name} was not probed: make engines with connect")
        return self._caps

    @property
    def features(self) -> Features:
        """What the server turned out to be able to do."""
        return self._features

    @property
    def weights_version(self) -> int:
        """Version that the server reported last; -1 for weights that did not come from a store."""
        return self._version

    async def probe(self, context_tokens: int | None = None) -> None:
        """Ask the server what it is. Raises EngineError where it cannot be used."""
        # The last two pass through the server's scheduler, which may be starting up or at a long prefill.
        patient = self._deadlines.control_s
        info, said = await self._get("/model_info"), await self._get("/server_info", patient)
        load = wire.load(await self._get("/v1/loads", patient))
        family = info.get("model_type")
        if family not in (None, self._model.family):
            raise EngineError(f"{self._name} serves a {family} model, the settings say {self._model.family}")
        held = said.get("context_length") or self._model.max_positions
        # The server's own limit leaves room for a last id.
        longest = said.get("max_req_input_len")
        release = str(said.get("version", ""))
        self._features = Features(release=release, plugin=await self._has_plugin())
        self._version = wire.version_number(info.get("weight_version"))
        self._caps = Caps(
            name=self._name,
            vocab_size=self._model.vocab_size,
            max_context_tokens=min(held, longest or held, context_tokens or held),
            kv_tokens=load.kv_tokens_used + load.kv_tokens_free,
            spans=bool(said.get("weight_version_spans")) or wire.release(release) >= wire.SPANS_SINCE,
            seeded=bool(said.get("enable_deterministic_inference")),
        )

    async def generate(self, request: Request) -> Generation:
        """Sample one turn. Cancelling the awaiting task ends the request on the server."""
        checked_request(self.caps, request)
        self._check_weights(f"request {request.rid}")
        # On the server an abort ends every request whose name begins with the one given: names are of equal length
        # up to the rid.
        rid = f"{uuid.uuid4().hex}/{request.rid}"
        body = wire.generate_body(request, rid, self._extra_key())
        async with self._registered(request.rid, rid):
            try:
                reply = await self._post("/generate", body, self._deadlines.turn_s, f"request {request.rid}")
            except wire.RefusedError as error:
                if DIVERGED in str(error):
                    raise DivergedError(str(error)) from error
                raise
        generation = self._read(wire.generation, reply, request, rid, self.caps.vocab_size)
        if np.any(generation.weights_versions < 0):
            self._version = -1
            raise EngineError(f"{self._name} sampled request {request.rid} from weights that are not from the store")
        if generation.finish_reason is FinishReason.STOP and generation.token_ids[-1] not in request.sampling.stop_ids:
            _LOG.warning("%s ended a turn at id %d of its own", self._name, generation.token_ids[-1])
        return generation

    async def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """f32[n]: log-probability of each id given the ids before it, at temperature 1; the first is 0."""
        ids = checked_text(self.caps, token_ids)
        self._check_weights("score")
        if len(ids) == 1:
            return np.zeros(1, np.float32)
        rid = uuid.uuid4().hex
        async with self._registered(rid, rid):
            body = wire.score_body(ids.tolist(), rid, self._extra_key())
            reply = await self._post("/generate", body, self._deadlines.turn_s, f"a score of {len(ids)} ids")
        return self._read(wire.scores, reply, ids)

    async def load(self) -> Load:
        """What the server holds now."""
        return self._read(wire.load, await self._get("/v1/loads"))

    async def alive(self) -> bool:
        """Whether the server's front answers; a server that was replaced, and so lost its weights, is found out."""
        try:
            info = await self._get("/model_info")
        except LimitError:
            raise
        except EngineError:
            return False
        if not isinstance(info, dict):  # something else answers at that address
            return False
        if not self._update_lock.locked():
            self._version = wire.version_number(info.get("weight_version"))
        return True

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling until resume."""
        await self._control("/pause_generation", {"mode": checked_mode(mode)})
        self._paused = True

    async def resume(self) -> None:
        """Sample again."""
        await self._control("/continue_generation", {})
        self._paused = False

    async def abort(self, rid: str | None = None) -> None:
        """End requests of this client; those of others on the same server go on."""
        names = list(self._running.values()) if rid is None else [self._running[rid]] if rid in self._running else []
        for name in names:
            await self._control("/abort_request", {"rid": name})

    async def flush(self) -> None:
        """Forget cached prefixes; EngineError where the server refuses since requests are running."""
        for wait_s in (0.1, 0.3, 1.0):  # it counts one as running for a moment after it has answered
            with contextlib.suppress(wire.RefusedError):
                return await self._control("/flush_cache", {})
            await asyncio.sleep(wait_s)
        await self._control("/flush_cache", {})

    async def update_weights(self, root: str, version: int) -> None:
        """Have the server read a committed version; requests in flight are retracted and go on under it.

        A server without spans cannot say which weights an id came from: there the update waits for requests in flight.
        """
        folder = await self._committed(root, version)
        if not self._features.plugin:
            raise EngineError(
                f"{self._name} cannot read the weight store: install this package there (pip install --no-deps) on "
                f"SGLang {'.'.join(map(str, wire.PLUGINS_SINCE))} or later; it is {self._features.release!r}"
            )
        async with self._update_lock:
            await self._prefetch(folder, version)
            body = {
                "model_path": f"{wire.SCHEME}{folder}",
                "load_format": "auto",  # the server's own may be `dummy`
                "weight_version": str(version),
                "flush_cache": True,
                "abort_all_requests": False,
            }
            async with self._held():
                await self._update(body, version)

    async def verify(self, root: str, version: int) -> None:
        """Have every rank of the server compare its weights with the store, byte for byte."""
        folder = await self._committed(root, version)
        live = wire.version_number((await self._get("/model_info")).get("weight_version"))
        if live != version:
            raise EngineError(f"{self._name} holds weights {live}, not those of version {version}")
        action = {"action": f"{wire.VERIFY}{folder}"}
        await self._post("/weights_checker", action, self._deadlines.update_s, f"the comparison with version {version}")

    async def close(self) -> None:
        """End this client's requests in flight; the server lives on."""
        if not self._closed:
            with contextlib.suppress(EngineError, TimeoutError):
                await self.abort()
                await asyncio.wait_for(self._ended.wait(), self._deadlines.probe_s)
            self._closed = True
        await asyncio.gather(*self._background)
        await self._session.close()

    # What the methods above are made of.

    def _extra_key(self) -> str:
        return f"{self._version}.{self._epoch}"

    def _read(self, parse: Any, *args: Any) -> Any:
        try:
            return parse(*args)
        except EngineError as error:
            raise type(error)(f"{self._name}: {error}") from error

    def _check_weights(self, what: str) -> None:
        if self._unknown:
            raise EngineError(f"{self._name} holds unknown weights ({self._unknown}): update it before {what}")
        if self._version < 0:
            raise EngineError(f"{self._name} has no weights yet: call update_weights before {what}")

    async def _committed(self, root: str, version: int) -> str:
        """Folder of a version, once it is sure that it holds this model."""
        try:
            await asyncio.to_thread(fetch.check, root, version, self._model)
        except fetch.FetchError as error:
            raise EngineError(f"{self._name} keeps weights {self._version}: {error}") from error
        return str(manifest.version_folder(root, version).absolute())

    @contextlib.asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """A server that is paused for as long as this lasts; left as it was found whatever happens."""
        pauses = self.caps.spans and not self._paused
        try:
            if pauses:
                await self._control("/pause_generation", {"mode": "retract"})
            yield
        finally:
            if pauses:
                await self._control("/continue_generation", {})

    async def _prefetch(self, folder: str, version: int) -> None:
        """Have the server read a version into its host memory while it still generates."""
        what = f"reading version {version} ahead"
        try:
            async with asyncio.timeout(self._deadlines.update_s):
                while True:
                    try:
                        await self._control("/weights_checker", {"action": f"{wire.PREFETCH}{folder}"})
                        return
                    except wire.RefusedError as error:
                        if wire.NOT_YET not in str(error):
                            raise EngineError(f"{self._name} keeps weights {self._version}: {error}") from error
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise EngineError(f"{self._name}: waited {self._deadlines.update_s:g} s for {what}") from error

    async def _update(self, body: dict[str, Any], version: int) -> None:
        what = f"the update to version {version}"
        old, self._unknown = self._unknown, f"{what} did not end"
        try:
            await self._post("/update_weights_from_disk", body, self._deadlines.update_s, what)
            live = wire.version_number((await self._get("/model_info")).get("weight_version"))
            if live != version:
                raise EngineError(f"{self._name} reports weights {live} after {what}")
        except EngineError as error:
            if isinstance(error, wire.RefusedError) and wire.is_untouched(str(error)):
                self._unknown = old
                raise EngineError(f"{self._name} keeps weights {self._version}: {error}") from error
            self._unknown = str(error)
            raise
        self._version, self._epoch, self._unknown = version, self._epoch + 1, ""

    async def _has_plugin(self) -> bool:
        try:
            await self._control("/weights_checker", {"action": wire.PROBE})
        except wire.RefusedError:
            return False
        return True

    @contextlib.asynccontextmanager
    async def _registered(self, rid: str, name: str) -> AsyncIterator[None]:
        """A request in flight under its name on the wire; cancelled, it is ended on the server too."""
        self._running[rid] = name
        self._ended.clear()
        try:
            yield
        except asyncio.CancelledError:
            self._spawn(self._control("/abort_request", {"rid": name}))
            raise
        finally:
            if self._running.get(rid) == name:
                del self._running[rid]
            if not self._running:
                self._ended.set()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start something that nobody waits for before close; a fault of it is logged."""

        async def quietly() -> None:
            try:
                await work
            except EngineError as error:
                _LOG.warning("%s", error)

        task = asyncio.get_running_loop().create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _get(self, path: str, limit_s: float = 0.0) -> Any:
        return await self._call("GET", path, None, limit_s or self._deadlines.probe_s, path)

    async def _control(self, path: str, body: dict[str, Any]) -> Any:
        return await self._post(path, body, self._deadlines.control_s, path)

    async def _post(self, path: str, body: dict[str, Any], limit_s: float, what: str) -> Any:
        return await self._call("POST", path, body, limit_s, what)

    async def _call(self, method: str, path: str, body: Any, limit_s: float, what: str) -> Any:
        """The JSON that the server answers (None for an answer that is none); every fault is an EngineError."""
        if self._closed:
            raise EngineError(f"{self._name} is closed")
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=min(limit_s, self._deadlines.connect_s))
        asked = {"timeout": timeout, "name": self._name, "what": what}
        return await sglang_call.call(self._session, method, self._url + path, body, **asked)
