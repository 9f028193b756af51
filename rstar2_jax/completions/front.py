"""The HTTP of the endpoint: OpenAI's chat completions, with the agent loop behind them.

    POST /v1/chat/completions     an answer, at once or streamed
    GET  /v1/models, /v1/models/NAME
    GET  /health                  200 while the engine lives, 503 otherwise; counts

A fault of ours is a 5xx (in the middle of a stream: an error event and no [DONE]), never an answer. A client that goes
away takes its episodes with it; one that reads slowly is waited for, but no longer than Rollout.deadline_s, and ten
minutes, for one event: one that never reads is dropped, and its places are free again. Bodies must be declared as
JSON, so that a web page cannot make a browser post them here.

Deliberately not here: authentication and TLS (a proxy's work), and records of what was asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from rstar2_jax import settings
from rstar2_jax.completions import listen, reply
from rstar2_jax.completions import request as requests
from rstar2_jax.data import conversation
from rstar2_jax.rollout import agent, deadline, tier
from rstar2_jax.rollout.engine import EngineError
from rstar2_jax.types import Prompt, StopReason, Trajectory

_LOG = logging.getLogger(__name__)
MAX_BODY_BYTES = 8 * 2**20
_TIMELINE_S = 60.0
_MOST_STALLED_S = 600.0  # a long budget lengthens a turn, not a client's patience
_STATUS_OF_FAULT = {"deadline": 504, "engine": 503, "tool": 503}


class FaultError(Exception):
    """An episode that a fault of ours ended."""

    def __init__(self, fault: agent.Fault) -> None:
        super().__init__(f"the answer was lost by a fault of the server while it waited for {fault.waiting_for}: "
                         f"{fault.message}")  # fmt: skip
        self.status = _STATUS_OF_FAULT.get(fault.kind, 500)


class _StalledError(Exception):
    """A client that does not read its stream."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Counts:
    """Since the start: requests served, refused and lost by a fault of ours; choices finished; those in flight now."""

    served: int = 0
    refused: int = 0
    faults: int = 0
    choices: int = 0
    in_flight: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """One checked request with what its episodes run with."""

    rid: str
    created: int
    asked: requests.Asked
    chat: conversation.Conversation
    rollout: settings.Rollout
    split: bool

    @property
    def clients_tools(self) -> bool:
        return bool(self.asked.tools)

    @property
    def prompt_tokens(self) -> int:
        return self.rollout.max_prompt_tokens


class Front:
    """The handlers around one tier.

    Args:
        opened: engine with weights, chat, tools.
        rollout: what a request that says nothing gets; its lengths are limits.
        limits: see settings.Endpoint.
        name: of the model, as clients must give it.
    """

    def __init__(self, opened: tier.Tier, rollout: settings.Rollout, limits: settings.Endpoint, name: str) -> None:
        self._tier, self._rollout, self._limits, self._name = opened, rollout, limits, name
        self._started = int(time.time())
        self._flushed_s = time.monotonic()
        self.counts = Counts()

    def app(self) -> web.Application:
        """The application to be run."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._errors])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._complete),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.get("/health", self._health),
            ]
        )
        return app

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, http: web.Request) -> web.Response:
        self._check_name(http.match_info["name"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self._name, "object": "model", "created": self._started, "owned_by": "rstar2_jax"}
        return card | {"max_model_len": self._tier.engine.caps.max_context_tokens}

    async def _health(self, http: web.Request) -> web.Response:
        alive = await self._tier.engine.alive()
        body = {"status": "ok" if alive else "no engine is in service", **dataclasses.asdict(self.counts)}
        return web.json_response(body, status=200 if alive else 503)

    def _flush_timeline(self) -> None:
        """A line of the timeline now and then: what it counts would grow for as long as the server lives."""
        now = time.monotonic()
        if now - self._flushed_s >= _TIMELINE_S:
            self._flushed_s = now
            self._tier.timeline.flush(self.counts.served)

    def _check_name(self, name: str) -> None:
        if name != self._name:
            message = f"the model {name[:80]!r} is not here: this endpoint serves {self._name!r}"
            raise requests.RefusedError(message, "model", code="model_not_found", status=404)

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        work = self._prepare(await _body(http))
        count = work.asked.n
        if self.counts.in_flight + count > self._limits.most_choices:
            raise requests.RefusedError(
                f"{self.counts.in_flight} answers are in flight and {count} more were asked for, above "
                f"Endpoint.most_choices = {self._limits.most_choices}: ask again later, or fewer at once",
                code="rate_limit_exceeded",
                status=429,
            )
        self.counts.in_flight += count
        try:
            answer = await (self._stream(http, work) if work.asked.stream else self._answer(work))
        finally:
            self.counts.in_flight -= count
            self._flush_timeline()
        return answer

    def _count_served(self, work: _Work) -> None:
        self.counts.served += 1
        self.counts.choices += work.asked.n

    def _prepare(self, body: Any) -> _Work:
        """The request with its ids, held against the lengths that the engine has room for."""
        asked = requests.read(body)
        self._check_name(asked.model)
        own, longest = self._tier.chat, self._tier.engine.caps.max_context_tokens
        size = len(json.dumps(asked.tools)) + sum(len(message["content"]) for message in asked.messages)
        if size > longest * own.tokenizer.max_token_chars:  # before it costs the time to make ids of it
            raise _too_long(f"the messages have {size} characters", longest)
        try:
            chat = conversation.Conversation(own, asked.messages, tools=asked.tools, thinks=asked.thinks)
        except ValueError as error:
            message = f"the template of the model cannot show these messages: {error}"
            raise requests.RefusedError(message, "messages") from error
        length = len(chat.prompt_ids(""))
        room, limit = longest - length, self._rollout.max_response_tokens
        if room < 1:
            raise _too_long(f"the messages have {length} tokens", longest)
        if asked.max_tokens is not None and asked.max_tokens > min(room, limit):
            raise requests.RefusedError(
                f"max_tokens = {asked.max_tokens} is above the {min(room, limit)} that this prompt of {length} tokens "
                f"leaves (Rollout.max_response_tokens = {limit}): send less, or leave it out for all there is",
                "max_tokens",
                code="context_length_exceeded",
            )
        said = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
        rollout = dataclasses.replace(
            self._rollout,
            **{name: value for name, value in said.items() if value is not None},
            max_prompt_tokens=length,
            max_response_tokens=asked.max_tokens or min(room, limit),
            max_turns=self._rollout.max_turns if asked.tools is None else 1,
        )
        split = self._limits.reasoning == "apart" if asked.split is None else asked.split
        return _Work(
            rid="chatcmpl-" + secrets.token_hex(12),
            created=int(time.time()),
            asked=asked,
            chat=chat,
            rollout=rollout,
            split=split or bool(asked.tools),
        )

    async def _answer(self, work: _Work) -> web.Response:
        async def one(index: int) -> reply.Choice:
            narrator = self._narrator(work)
            trajectory = await self._episode(work, index, lambda seat: seat)
            told = reply.narrate(narrator, work.chat, trajectory)
            last, choice = reply.finish(narrator, work.chat, trajectory, clients_tools=work.clients_tools)
            return reply.with_texts(choice, [*told, *last])

        choices = await deadline.together([one(index) for index in range(work.asked.n)])
        self._count_served(work)
        return web.json_response(reply.completion(work.rid, work.created, self._name, work.prompt_tokens, choices))

    async def _stream(self, http: web.Request, work: _Work) -> web.StreamResponse:
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        task = asyncio.create_task(self._tell_all(work, events))
        task.add_done_callback(lambda _: events.put_nowait(None))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        try:
            first = await events.get()
            if first is None:
                task.result()  # a fault before anything was said is an error of the request
            await response.prepare(http)
            event = first
            while event is not None:
                await self._taken(response.write(_event(json.dumps(event))))
                event = await events.get()
            try:
                task.result()
                await self._taken(response.write(_event("[DONE]")))
                self._count_served(work)
            except (FaultError, EngineError) as error:
                self.counts.faults += 1
                said = json.dumps(_error_body(str(error), "server_error"))
                await self._taken(response.write(_event(said)))
            await self._taken(response.write_eof())
            return response
        except _StalledError:
            _LOG.warning("a client that read nothing of its stream for %g s is dropped", self._stalled_s)
            if http.transport is not None:
                http.transport.abort()  # to close it in order would wait for the client once more
            return response
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def _stalled_s(self) -> float:
        return min(self._rollout.deadline_s, _MOST_STALLED_S)

    async def _taken(self, written: Awaitable[None]) -> None:
        """Raises _StalledError where the client takes nothing for as long as it may."""
        try:
            async with asyncio.timeout(self._stalled_s):
                await written
        except TimeoutError:
            raise _StalledError from None

    async def _tell_all(self, work: _Work, events: asyncio.Queue[dict[str, Any] | None]) -> None:
        """Events of all choices into the queue, as they come."""

        def event(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
            return reply.chunk(work.rid, work.created, self._name, choices)

        async def one(index: int) -> reply.Choice:
            narrator = self._narrator(work)
            begun = False

            def tell(pieces: Sequence[reply.Piece]) -> None:
                nonlocal begun
                if pieces and not begun:
                    begun = True
                    events.put_nowait(event([reply.delta(index, {"role": "assistant", "content": ""})]))
                for piece in pieces:
                    events.put_nowait(event([reply.delta(index, {piece.field: piece.text})]))

            def listener(seat: agent.Seat) -> agent.Seat:
                return listen.Listener(seat, work.chat, narrator, tell)

            trajectory = await self._episode(work, index, listener)
            last, choice = reply.finish(narrator, work.chat, trajectory, clients_tools=work.clients_tools)
            tell(last)
            said = {"tool_calls": reply.tool_calls(work.rid, index, choice)} if choice.calls else {}
            events.put_nowait(event([reply.delta(index, said, choice)]))
            return choice

        choices = await deadline.together([one(index) for index in range(work.asked.n)])
        if work.asked.usage_in_stream:
            events.put_nowait(event([]) | {"usage": reply.usage(work.prompt_tokens, choices)})

    def _narrator(self, work: _Work) -> reply.Narrator:
        opened = work.chat.forced if work.asked.thinks else ""
        return reply.Narrator(opened, split=work.split, stop=work.asked.stop, single=work.asked.tools is not None)

    async def _episode(self, work: _Work, index: int, around: Callable[[agent.Seat], agent.Seat]) -> Trajectory:
        """One episode in a seat of its own. Raises FaultError where a fault of ours ended it."""
        seed = secrets.randbelow(2**31) if work.asked.seed is None else work.asked.seed
        if index and work.asked.seed is not None:
            seed = agent.episode_seed(seed, 0, "choice", index)
        faults: list[agent.Fault] = []
        rollout = work.rollout
        async with self._tier.engine.seat(
            f"{work.rid}/{index}",
            family=work.rid,
            prompt_tokens=rollout.max_prompt_tokens,
            budget_tokens=rollout.max_response_tokens,
        ) as seat:
            trajectory = await agent.run_episode(
                around(seat),
                work.chat,
                self._tier.tools,
                Prompt(id=work.rid, question="", answer="", source="endpoint"),
                sample_index=index,
                seed=seed,
                settings=rollout,
                on_fault=faults.append,
            )
        if trajectory.stop_reason is StopReason.LOST:
            raise FaultError(next(fault for fault in faults if fault.lost))
        return trajectory

    @web.middleware
    async def _errors(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        """Every refusal and every fault in OpenAI's form."""
        try:
            return await handler(request)
        except requests.RefusedError as error:
            self.counts.refused += 1
            kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
            headers = {"Retry-After": "1"} if error.status == 429 else {}
            body = _error_body(error.message, kind, error.field, error.code)
            return web.json_response(body, status=error.status, headers=headers)
        except (FaultError, EngineError) as error:
            self.counts.faults += 1
            _LOG.warning("request lost: %s", error)
            status = error.status if isinstance(error, FaultError) else 503
            return web.json_response(_error_body(str(error), "server_error"), status=status)
        except web.HTTPException as error:  # no such route, wrong method, a body that is too large
            if error.status < 400:
                raise
            self.counts.refused += 1
            headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
            message = f"{request.method} {request.path}: {error.reason}"
            return web.json_response(
                _error_body(message, "invalid_request_error"), status=error.status, headers=headers
            )


async def _body(http: web.Request) -> Any:
    """The decoded body of a request."""
    if http.content_type != "application/json":
        message = f"Content-Type is {http.content_type}: send the body as application/json"
        raise requests.RefusedError(message, status=415)
    raw = await http.read()
    try:
        return json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise requests.RefusedError(f"the body cannot be read as JSON: {error}"[:300]) from None


def _too_long(what: str, longest: int) -> requests.RefusedError:
    message = (
        f"{what}, the context holds {longest} tokens: shorten them, or start the endpoint with a larger "
        "Rollout.max_prompt_tokens"
    )
    return requests.RefusedError(message, "messages", code="context_length_exceeded")


def _event(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _error_body(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
