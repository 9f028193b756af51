"""Where a run's engines and its endpoint are: settings kept apart from settings.py, which binds them under its name."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

_MOST_IN_RANGE = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The engines of a run and how rollouts are spread over them (rollout/pool.py).

    Args:
        engines: addresses of servers that run already (`http://host:port`, SGLang or rollout/serve.py); a range in
            brackets stands for all of it, so that `http://node[01-08]:[30000-30007]` is 64 addresses.
        tensor_parallel: devices of each such server; for the command lines that a dry run prints.
        replicas: without addresses: engine processes of our own to start and keep alive on this machine; 0 is one
            engine inside the trainer.
        expected_quantile: how surely an engine's rollouts stay within its KV memory, judged by the lengths of those
            that ended; 0 reserves the whole budget of each.
        longest_first: rollouts that have come furthest leave the queue first, instead of those that came first.
        move_share: most tokens that are computed again because rollouts move between two turns from engines with much
            work left to those with little, as a share of the sampled ones; 0 never moves one.
        keep_place: a rollout keeps its KV tokens while its tools run; otherwise it queues again after each turn.
        rolling: update engine by engine instead of all at once.
        probe_s: time between two looks at an engine; 0 never looks.
        progress_s: an engine with work that gives no sign of it for so long is taken down.
    """

    engines: tuple[str, ...] = ()
    tensor_parallel: int = 1
    replicas: int = 0
    expected_quantile: float = 0.95
    longest_first: bool = False
    move_share: float = 0.01
    keep_place: bool = True
    rolling: bool = False
    probe_s: float = 5.0
    progress_s: float = 120.0

    def __post_init__(self) -> None:
        addresses, quantile = self.addresses, self.expected_quantile
        odd = next((wrong for address in addresses if (wrong := _odd(address))), "")
        rules = [
            ("replicas", self.replicas >= 0, "must be 0 (an engine inside the trainer) or more processes"),
            ("replicas", not (self.engines and self.replicas), "must be 0 where addresses of engines are given"),
            ("engines", len(set(addresses)) == len(addresses), "names an address twice"),
            ("engines", not odd, odd),
            ("tensor_parallel", self.tensor_parallel > 0, "must be above 0"),
            (
                "expected_quantile",
                not quantile or 0.5 <= quantile < 1,
                "must be 0 (reserves the whole budget) or in [0.5, 1)",
            ),
            ("move_share", 0 <= self.move_share <= 1, "must be a share from 0 (never) to 1"),
            ("probe_s", self.probe_s >= 0, "must be 0 (never) or more"),
            ("progress_s", self.progress_s > 0, "must be above 0"),
        ]
        for field, ok, rule in rules:
            if not ok:
                raise ValueError(f"Fleet.{field} = {getattr(self, field)!r}: {rule}")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address that `engines` stands for."""
        return tuple(address for pattern in self.engines for address in _expanded(pattern))

    def published_dtype(self, compute_dtype: str) -> str:
        """dtype of the weights that these engines fetch: a server copies them as they are and takes those alone that it
        computes with; engines of our own keep norms and embeddings in float32."""
        return compute_dtype if self.engines else "float32"


def _odd(address: str) -> str:
    """What is wrong with an address and how to write it, or nothing."""
    wanted = f"{address!r} must be http://host:port"
    if address != address.strip() or not address.startswith(("http://", "https://")):
        return f"{wanted}, beginning with http:// or https:// and without spaces"
    rest = address.partition("://")[2]
    if set("/?#@") & set(rest):
        return f"{wanted} and no more: take away what follows the port or precedes the host"
    host, colon, port = rest.rpartition(":") if not rest.endswith("]") else (rest, "", "")
    if not colon:
        host = rest
    elif not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return f"{wanted}: the port is {port!r}, and must be a number from 1 to 65535"
    if re.fullmatch(r"\[[0-9A-Fa-f:.]+\]", host):
        return ""  # IPv6
    if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.\-]*[A-Za-z0-9_.])?", host):
        return f"{wanted}: the host is {host!r}; a range in it is two numbers, as in node[01-08]"
    return ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where and how a finished model answers over HTTP (endpoint.py).

    Args:
        host: address to listen on; there is no authentication, so that others than the loopback need a trusted network.
        port: 0 takes a free one.
        model_name: as clients must give it; empty is the name of the folder that the weights come from.
        reasoning: thoughts and tool calls `apart`, as reasoning_content, or `inside` the content.
        most_choices: answers in flight; beyond that a request is refused with 429.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = ""
    reasoning: Literal["apart", "inside"] = "apart"
    most_choices: int = 256

    def __post_init__(self) -> None:
        rules = [
            ("host", bool(self.host), "must be an address of this machine"),
            ("port", 0 <= self.port < 2**16, "must be in [0, 65535]; 0 takes a free one"),
            ("reasoning", self.reasoning in ("apart", "inside"), "must be one of apart, inside"),
            ("most_choices", self.most_choices > 0, "must be above 0"),
        ]
        for field, ok, rule in rules:
            if not ok:
                raise ValueError(f"Endpoint.{field} = {getattr(self, field)!r}: {rule}")


def _expanded(pattern: str) -> list[str]:
    """`a[08-10]` as a08, a09, a10, the ranges from left to right."""
    found = re.search(r"\[(\d+)-(\d+)\]", pattern)
    if found is None:
        return [pattern]
    first, last, width = int(found[1]), int(found[2]), len(found[1])
    if not 0 <= last - first < _MOST_IN_RANGE:
        size = "empty" if last < first else f"of more than {_MOST_IN_RANGE} addresses"
        raise ValueError(f"Fleet.engines: {pattern!r}: the range {found[0]} is {size}")
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [f"{head}{number:0{width}}{rest}" for number in range(first, last + 1) for rest in _expanded(tail)]
