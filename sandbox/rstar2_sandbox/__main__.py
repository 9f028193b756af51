"""Command line: `python -m rstar2_sandbox master | worker | http | metrics | top | bench | doctor | build`. The one
place that reads the environment."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
import tempfile
import urllib.parse
from collections.abc import Callable
from typing import Any

from rstar2_sandbox import build, executor, jail, master, supervise, worker
from rstar2_sandbox.connection import LOST

URL_VARIABLE = "RSTAR2_SANDBOX_REDIS_URL"
PASSWORD_VARIABLE = "RSTAR2_SANDBOX_REDIS_PASSWORD"


def main(argv: list[str] | None = None) -> int:
    """Run a role; return the exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="sandbox %(levelname)s %(message)s")
    try:
        return arguments.role(arguments)
    except (ValueError, OSError, ImportError, RuntimeError, *LOST) as error:
        print(f"rstar2_sandbox: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _number(kind: type[int] | type[float], least: float, most: float = 2**31) -> Callable[[str], float]:
    """What argparse reads a number with: within its bounds, or refused by name."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return value

    return read


_COUNT, _SIZE, _SECONDS = _number(int, 0), _number(int, 1), _number(float, 0.01)
_PORT, _FIXED_PORT = _number(int, 0, 65535), _number(int, 1, 65535)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rstar2_sandbox", description=__doc__)
    roles = parser.add_subparsers(required=True, metavar="role")
    at_master = roles.add_parser("master", help="use or start a Redis, and return the calls of dead nodes to the queue")
    at_master.add_argument("--port", type=_FIXED_PORT, default=6379, help="port of the Redis that is started")
    at_master.add_argument("--bind", default="127.0.0.1", help="address it listens on")
    at_master.add_argument(
        "--max_mib", type=_COUNT, default=4096, help="memory at which it has clients wait; 0: no bound"
    )
    at_master.add_argument("--keep", default="", help="folder to keep the queue in over restarts; empty: it is lost")
    at_master.add_argument("--acl", default="", help="file of Redis users, see deploy/redis-users.acl")
    at_master.set_defaults(role=_master)
    node = roles.add_parser("worker", help="run a node")
    _node_options(node)
    node.set_defaults(role=_worker)
    doctor = roles.add_parser("doctor", help="say what this machine offers: isolation, Redis, calls a second")
    _node_options(doctor)
    doctor.add_argument("--queue_calls", type=_COUNT, default=0, help="also send so many calls through a private queue")
    doctor.set_defaults(role=_doctor)
    _observer_options(roles)
    built = roles.add_parser("build", help="compile the optional part in C, in place")
    built.set_defaults(role=lambda arguments: print(build.build()) or 0)
    inner = roles.add_parser("supervise", help="used by rstar2_sandbox.local")
    inner.add_argument("folder")
    inner.add_argument("options", nargs=argparse.REMAINDER)
    inner.set_defaults(role=lambda arguments: supervise.Supervisor(arguments.folder, arguments.options).run())
    return parser


def _observer_options(roles: Any) -> None:
    front = roles.add_parser("http", help="serve the HTTP interface of code-judge")
    front.add_argument("--bind", default="127.0.0.1")
    front.add_argument("--port", type=_PORT, default=8088, help="0 takes a free one and prints it")
    front.add_argument("--run_limit_s", type=_SECONDS, default=10.0, help="wall limit of one program")
    front.add_argument("--queue_limit_s", type=_SECONDS, default=15.0, help="limit on the wait before it starts")
    front.add_argument("--long_queue_limit_s", type=_SECONDS, default=3600.0, help="the same in the long-batch calls")
    front.add_argument("--memory_mib", type=_SIZE, default=512)
    front.set_defaults(role=_http)
    numbers = roles.add_parser("metrics", help="serve the cluster's numbers to Prometheus")
    numbers.add_argument("--bind", default="127.0.0.1")
    numbers.add_argument("--port", type=_PORT, default=9108, help="0 takes a free one and prints it")
    numbers.set_defaults(role=_metrics)
    live = roles.add_parser("top", help="show the cluster, live")
    live.add_argument("--once", action="store_true", help="print it once and end")
    live.add_argument("--node", default="", help="say only whether the node of that name is alive: a probe")
    live.set_defaults(role=_top)
    load = roles.add_parser("bench", help="load the cluster and print what it does")
    load.add_argument("--seconds", type=_SECONDS, default=60.0, help="of each part")
    load.add_argument("--burst", type=_COUNT, default=0, help="also submit so many calls at once")
    load.set_defaults(role=_bench)


def _node_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=_SIZE, default=os.cpu_count() or 1, help="executions at once")
    parser.add_argument("--verify_slots", type=_SIZE, default=1, help="verifications at once that need a process")
    parser.add_argument("--session_slots", type=_COUNT, default=4, help="stateful sessions that live at once")
    parser.add_argument("--no_compiled", action="store_true", help="leave the part in C alone")
    parser.add_argument("--isolation", default="auto", help=f"auto or one of {', '.join(jail.TIERS)}")
    parser.add_argument("--min_isolation", default=jail.PLAIN, help="weakest tier that auto may take")
    parser.add_argument("--uid_base", type=_COUNT, default=0, help="first host user id for the slots (as root)")
    parser.add_argument("--python", default="", help="interpreter that programs run on")
    parser.add_argument("--name", default="", help="unique name of the node, kept over restarts")


def _settings(arguments: argparse.Namespace) -> executor.Settings:
    return executor.Settings(
        isolation=arguments.isolation,
        min_isolation=arguments.min_isolation,
        uid_base=arguments.uid_base,
        python=arguments.python,
        compiled=not arguments.no_compiled,
    )


def _url() -> str:
    url = os.environ.get(URL_VARIABLE, "")
    if not url:
        raise ValueError(f"{URL_VARIABLE} is not set: give the address of the cluster's Redis in it, password included")
    return url


def _master(arguments: argparse.Namespace) -> int:
    url = os.environ.get(URL_VARIABLE, "")
    if url:
        asyncio.run(master.serve(url))
        return 0
    password = os.environ.get(PASSWORD_VARIABLE, "")
    if not password:
        raise ValueError(f"set {URL_VARIABLE} to use a running Redis, or {PASSWORD_VARIABLE} to have one started")
    with contextlib.ExitStack() as stack:
        folder = os.path.abspath(arguments.keep) if arguments.keep else ""
        folder = folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="rstar2-master-"))
        os.makedirs(folder, mode=0o700, exist_ok=True)
        config = master.redis_config(
            folder,
            password,
            port=arguments.port,
            bind=arguments.bind,
            max_bytes=arguments.max_mib * 2**20,
            keep=bool(arguments.keep),
            users=arguments.acl,
        )
        user = "master" if arguments.acl else ""
        secret = urllib.parse.quote(password, safe="")
        host = f"[{arguments.bind}]" if ":" in arguments.bind else arguments.bind
        url = f"redis://{user}:{secret}@{host}:{arguments.port}"
        asyncio.run(master.serve(url, config, master.log_of(folder)))
    return 0


def _worker(arguments: argparse.Namespace) -> int:
    node = worker.Node(
        _url(),
        slots=arguments.slots,
        settings=_settings(arguments),
        name=arguments.name,
        verify_slots=arguments.verify_slots,
        session_slots=arguments.session_slots,
    )
    asyncio.run(node.run(lambda tier: print(json.dumps({"tier": tier}), flush=True)))
    return 0


def _http(arguments: argparse.Namespace) -> int:
    from rstar2_sandbox import front

    limits = front.FrontLimits(
        run_s=arguments.run_limit_s,
        queue_s=arguments.queue_limit_s,
        long_queue_s=arguments.long_queue_limit_s,
        memory_bytes=arguments.memory_mib * 2**20,
    )
    asyncio.run(front.serve(_url(), arguments.bind, arguments.port, limits))
    return 0


def _metrics(arguments: argparse.Namespace) -> int:
    from rstar2_sandbox import metrics

    metrics.serve(_url(), arguments.port, arguments.bind)
    return 0


def _top(arguments: argparse.Namespace) -> int:
    from rstar2_sandbox import top

    if arguments.node:
        return asyncio.run(top.probe(_url(), arguments.node))
    asyncio.run(top.show(_url(), once=arguments.once))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from rstar2_sandbox import bench

    return asyncio.run(bench.report(_url(), arguments.seconds, arguments.burst))


def _doctor(arguments: argparse.Namespace) -> int:
    from rstar2_sandbox import doctor

    return asyncio.run(doctor.report(arguments.slots, _settings(arguments), arguments.queue_calls))


if __name__ == "__main__":
    sys.exit(main())
