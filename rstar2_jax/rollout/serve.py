"""An engine of this package behind SGLang's HTTP protocol, as far as sglang_wire.py goes: a process of its own.

    python -m rstar2_jax.rollout.serve --model model.json --slots 16 --context_tokens 4096 --port 30000

model.json holds the fields of settings.Model. The first line on stdout is JSON: {"url": ..., "pid": ...}. The engine
has no weights until a client sends /update_weights_from_disk with `tensorstore:FOLDER` of a committed version.

It listens on the loopback unless told otherwise: there is no authentication, so that elsewhere only a trusted network
may reach it. A client that goes away takes its request with it.

Deliberately not here: text, streaming, several engines in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from rstar2_jax.io import limits
from rstar2_jax.rollout import sglang_wire as wire
from rstar2_jax.rollout.engine import EngineError, Request, RolloutEngine, Sampling
from rstar2_jax.rollout.jax_engine import JaxEngine
from rstar2_jax.settings import Model

MAX_BODY_BYTES = 64 * 2**20
LONGEST_EXIT_S = 5.0  # for connections that are still open when the server ends


class Front:
    """The handlers around one engine."""

    def __init__(self, engine: RolloutEngine, family: str) -> None:
        self._engine, self._family = engine, family

    def app(self) -> web.Application:
        """The application that `serve` runs."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_faults])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/update_weights_from_disk", self._update),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._resume),
                web.post("/abort_request", self._abort),
                web.post("/flush_cache", self._flush),
                web.post("/weights_checker", self._check),
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/v1/loads", self._loads),
                web.get("/ready", self._ready),
            ]
        )
        return app

    async def _generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        params = body["sampling_params"]
        if params["max_new_tokens"] == 0:
            scores = (await self._engine.score(body["input_ids"])).tolist()
            entries = [[score, i, None] for score, i in zip(scores, body["input_ids"], strict=True)]
            entries[0][0] = None
            meta = {"id": body["rid"], "input_token_logprobs": entries, "output_token_logprobs": []}
            return web.json_response({"output_ids": [], "meta_info": meta})
        sampling = Sampling(
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            top_k=params.get("top_k", -1),
            max_new_tokens=params["max_new_tokens"],
            stop_ids=tuple(params.get("stop_token_ids") or ()),
        )
        seed = wire.unsigned(params.get("sampling_seed", 0))
        request = Request(rid=body["rid"], prompt_ids=body["input_ids"], seed=seed, sampling=sampling)
        return web.json_response(wire.reply_to_generate(body, await self._engine.generate(request)))

    async def _update(self, http: web.Request) -> web.Response:
        body = await http.json()
        root, version = _named_version(body["model_path"].removeprefix(wire.SCHEME))
        if str(version) != str(body.get("weight_version")):
            raise ValueError(f"weight_version {body.get('weight_version')!r} is not that of {body['model_path']}")
        try:
            await self._engine.update_weights(root, version)
        except EngineError as error:
            if await self._engine.alive():
                return _refusal(f"{wire.UNTOUCHED}: {error}")
            raise
        return web.json_response({"success": True, "message": "updated", "num_paused_requests": 0})

    async def _check(self, http: web.Request) -> web.Response:
        action = (await http.json())["action"]
        if action.startswith(wire.VERIFY):
            await self._engine.verify(*_named_version(action.removeprefix(wire.VERIFY)))
        elif action != wire.PROBE and not action.startswith(wire.PREFETCH):  # it reads while it samples, anyway
            raise ValueError(f"action {action!r} is not known here")
        return web.json_response({"success": True, "message": "Success."})

    async def _pause(self, http: web.Request) -> web.Response:
        await self._engine.pause((await http.json())["mode"])
        return web.json_response({"status": "ok"})

    async def _resume(self, http: web.Request) -> web.Response:
        await self._engine.resume()
        return web.json_response({"status": "ok"})

    async def _abort(self, http: web.Request) -> web.Response:
        body = await http.json()
        if body.get("abort_all") or body.get("rid"):
            await self._engine.abort(None if body.get("abort_all") else body["rid"])
        return web.Response()

    async def _flush(self, http: web.Request) -> web.Response:
        await self._engine.flush()
        return web.Response()

    async def _model_info(self, http: web.Request) -> web.Response:
        if not await self._engine.alive():
            raise EngineError(f"{self._engine.caps.name} does not live")
        return web.json_response({"model_type": self._family, "weight_version": str(self._engine.weights_version)})

    async def _server_info(self, http: web.Request) -> web.Response:
        caps = self._engine.caps
        info = {
            "version": "rstar2_jax",
            "context_length": caps.max_context_tokens,
            "max_total_num_tokens": caps.kv_tokens,
            "enable_deterministic_inference": caps.seeded,
            "weight_version_spans": caps.spans,
        }
        return web.json_response(info)

    async def _loads(self, http: web.Request) -> web.Response:
        return web.json_response(wire.reply_to_loads(await self._engine.load()))

    async def _ready(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if await self._engine.alive() else 503)


def _named_version(folder: str) -> tuple[str, int]:
    """(store, version) of a version folder."""
    path = pathlib.Path(folder)
    if not path.name.isdecimal():
        raise ValueError(f"{folder!r} is no version folder of a weight store: its name must be a number")
    return str(path.parent), int(path.name)


def _refusal(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)


@web.middleware
async def _faults(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
    """Requests that cannot be served become 400, faults of the engine 503; each with its words."""
    try:
        return await handler(request)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return _refusal(f"{type(error).__name__}: {error}")
    except EngineError as error:
        return web.json_response({"success": False, "message": str(error)}, status=503)


@contextlib.asynccontextmanager
async def serve(engine: RolloutEngine, family: str, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """The url under which the engine is served for as long as this lasts; the engine itself is left open.

    Args:
        family: of the model, as settings.Model names it.
        port: 0 takes a free one.
    """
    runner = web.AppRunner(
        Front(engine, family).app(), handler_cancellation=True, access_log=None, shutdown_timeout=LONGEST_EXIT_S
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0]
        yield f"http://{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()


async def _main(arguments: argparse.Namespace) -> None:
    fields = {field.name for field in dataclasses.fields(Model)}
    said = json.loads(pathlib.Path(arguments.model).read_text())
    if unknown := sorted(said.keys() - fields):
        raise SystemExit(f"{arguments.model}: {unknown} are no fields of settings.Model ({sorted(fields)})")
    model = Model(**said)
    if arguments.parent:
        _end_with(arguments.parent)
    engine = JaxEngine(
        model,
        slots=arguments.slots,
        context_tokens=arguments.context_tokens,
        prefill_chunk_tokens=arguments.prefill_chunk_tokens,
        decode_steps=arguments.decode_steps,
        name=arguments.name,
    )
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        async with serve(engine, model.family, host=arguments.host, port=arguments.port) as url:
            print(json.dumps({"url": url, "pid": os.getpid()}), flush=True)
            await ended.wait()
    finally:
        await engine.close()


def _end_with(parent: int) -> None:
    """Be killed when the parent dies, however it dies. (Set here and not by the parent: a process with JAX in it must
    not fork, and only a fork could set it there.)"""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit(f"process {parent} is gone already")


def main(argv: list[str] | None = None) -> None:
    """Serve one embedded engine until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="Serve one embedded rollout engine over HTTP.")
    parser.add_argument("--model", required=True, help="JSON file with the fields of settings.Model")
    parser.add_argument("--slots", type=int, required=True, help="rows of the decode batch")
    parser.add_argument("--context_tokens", type=int, required=True, help="longest prompt plus response")
    parser.add_argument("--prefill_chunk_tokens", type=int, default=32, help="columns of a prefill call")
    parser.add_argument("--decode_steps", type=int, default=16, help="most ids a row samples in one device call")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; there is no authentication")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--name", default="embedded", help="of this replica")
    parser.add_argument("--parent", type=int, default=0, help="process id of whoever started it, to be killed with")
    arguments = parser.parse_args(argv)
    limits.raise_open_files()
    asyncio.run(_main(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
