"""A server that speaks the protocol of an engine and fails on request: dies, hangs, cuts short, lags behind."""

from __future__ import annotations

import asyncio
import contextlib
import json

from aiohttp import web

from rstar2_jax.rollout import sglang_wire as wire

HANG_S = 30.0


class FaultyServer:
    """Answers every turn with ids 1, 2, 3... up to the limit, unless `faults[path]` says otherwise.

    A fault is "die" (the connection is closed), "hang", "cut" (half of the JSON is sent), "torn" (the connection
    ends in the middle of the body), "html" (no JSON), "deep" (JSON without end), an integer (that status), or a
    function that changes the reply.
    """

    def __init__(self, *, release="0.5.23", plugin=True, spans=True, version="default"):
        self.release, self.plugin, self.spans, self.version = release, plugin, spans, version
        self.faults = {}
        self.asked = []  # (path, body) in order
        self.hold = asyncio.Event()  # turns wait for it while it is cleared
        self.hold.set()

    def paths(self):
        """What was asked for, without the probes."""
        return [path for path, _ in self.asked if path not in ("/model_info", "/server_info", "/v1/loads")]

    def bodies(self, path):
        """Bodies sent to one path."""
        return [body for asked, body in self.asked if asked == path]

    async def answer(self, request):
        """One request of any kind."""
        path = request.path
        body = await request.json() if request.method == "POST" else None
        self.asked.append((path, body))
        fault = self.faults.get(path)
        if fault == "die":
            request.transport.close()
        if fault == "hang":
            await asyncio.sleep(HANG_S)
        if isinstance(fault, int):
            return web.json_response({"message": f"status {fault} was asked for"}, status=fault)
        if fault == "deep":
            return web.Response(text="[" * 100_000, content_type="application/json")
        if fault == "html":
            return web.Response(text="<html>busy</html>", content_type="text/html")
        reply = await self.reply(path, body)
        if callable(fault):
            reply = fault(reply)
        text = json.dumps(reply)
        status = 200 if not isinstance(reply, dict) or reply.get("success", True) else 400
        if fault == "cut":
            return web.Response(text=text[: len(text) // 2], content_type="application/json")
        if fault == "torn":
            response = web.StreamResponse(
                headers={"Content-Length": str(len(text)), "Content-Type": "application/json"}
            )
            await response.prepare(request)
            await response.write(text[: len(text) // 2].encode())
            request.transport.close()
            return response
        return web.Response(text=text, status=status, content_type="application/json")

    async def reply(self, path, body):
        """What a sound server answers."""
        if path == "/generate":
            await self.hold.wait()
            return self.turn(body)
        if path == "/update_weights_from_disk":
            self.version = body["weight_version"]
        ours = (wire.PROBE, wire.PREFETCH, wire.VERIFY)
        if path == "/weights_checker" and not (self.plugin and body["action"].startswith(ours)):
            return {"success": False, "message": f"Unsupported action={body['action']!r}"}
        return {
            "/model_info": {"model_type": "qwen3", "weight_version": self.version},
            "/server_info": {"version": self.release, "context_length": 64},
            "/v1/loads": {
                "loads": [
                    {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_used_tokens": 30, "max_total_num_tokens": 100}
                    for _ in range(2)
                ]
            },
        }.get(path, {"success": True, "message": "done"})

    def turn(self, body):
        """A whole answer to /generate."""
        count = body["sampling_params"]["max_new_tokens"]
        ids = list(range(1, count + 1))
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "length", "length": count},
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
        }
        if self.spans:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": count}]
        return {"output_ids": ids, "meta_info": meta}

    @contextlib.asynccontextmanager
    async def running(self):
        """The url of the server for as long as this lasts."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield "http://{}:{}".format(*runner.addresses[0][:2])
        finally:
            await runner.cleanup()
