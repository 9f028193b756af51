"""What travels between a rollout engine and its HTTP front: the part of SGLang's protocol that we use, purely.

Client (sglang.py) and server (serve.py) both read and write it here, so that the two agree. Whatever comes from the
other side is checked before it becomes a value of ours: a reply that is cut short, of another request or not a number
is an EngineError that says what was wrong.

Deliberately not here: sockets and waiting.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rstar2_jax.rollout.engine import DIVERGED, DivergedError, EngineError, Generation, Load, Request
from rstar2_jax.types import FinishReason
from rstar2_jax.weights import sglang_loader

# What our plug-in in the server knows: a model_path that names a version folder, and three actions of /weights_checker.
SCHEME = sglang_loader.SCHEME
PROBE = sglang_loader.PROBE  # answered where the plug-in is installed
PREFETCH = sglang_loader.PREFETCH  # read a version ahead of its update; refused with NOT_YET until it is read
NOT_YET = sglang_loader.NOT_YET
VERIFY = sglang_loader.VERIFY  # compare the weights in use with a version
UNTOUCHED = "Failed to get weights iterator"  # so a server begins its refusal while its old weights are whole
SPANS_SINCE, PLUGINS_SINCE = (0, 5, 20), (0, 5, 11)


class RefusedError(EngineError):
    """The server answered, and what it said is no."""


def generate_body(request: Request, rid: str, extra_key: str) -> dict[str, Any]:
    """The body of /generate for one turn.

    Args:
        rid: name on the wire. An abort ends every request whose name begins with its own: no name may begin another.
        extra_key: keeps the prefix cache of one set of weights apart from that of others.
    """
    sampling = request.sampling
    params = {
        "temperature": float(sampling.temperature),  # numbers of numpy are none of JSON's
        "top_p": float(sampling.top_p),
        "top_k": int(sampling.top_k),
        "min_p": 0.0,
        "max_new_tokens": int(sampling.max_new_tokens),
        "stop_token_ids": [int(i) for i in sampling.stop_ids],
        "ignore_eos": False,  # True would switch stop_token_ids off as well
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "sampling_seed": _signed(int(request.seed)),
    }
    return {
        "rid": rid,
        "input_ids": [int(i) for i in request.prompt_ids],
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
        "extra_key": extra_key,
    }


def score_body(token_ids: Iterable[int], rid: str, extra_key: str) -> dict[str, Any]:
    """The body of /generate that asks for the log-probabilities of a text and for no new id."""
    return {
        "rid": rid,
        "input_ids": [int(i) for i in token_ids],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "stream": False,
        "extra_key": extra_key,
    }


def _signed(seed: int) -> int:
    """A seed in [0, 2**64) as the 64-bit integer with a sign that the protocol knows."""
    return seed - 2**64 if seed >= 2**63 else seed


def unsigned(seed: int) -> int:
    """The seed that `generate_body` was given."""
    return seed % 2**64


def generation(reply: Any, request: Request, rid: str, vocab_size: int) -> Generation:
    """The turn that a reply of /generate holds.

    Raises:
        EngineError: the reply is not a whole answer to this request.
    """
    try:
        meta = reply["meta_info"]
        ids = np.asarray(reply["output_ids"], np.int64)
        if meta["id"] != rid:
            raise EngineError(f"the reply to {rid} is one to {meta['id']!r}")
        reason = _finish_reason(meta["finish_reason"])
        logprobs = _logprobs(meta.get("output_token_logprobs") or [], ids)
        versions = _versions(meta, len(ids))
        preempted = int(meta.get("num_retractions") or 0)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise EngineError(f"the reply to {rid} cannot be read ({error!r}): {str(reply)[:200]}") from error
    limit = request.sampling.max_new_tokens
    rules = [
        (ids.ndim == 1, "its ids are no list"),
        (len(ids) <= limit, f"{len(ids)} ids came, {limit} were asked for"),
        (np.all((ids >= 0) & (ids < vocab_size)), f"an id is outside the vocabulary of {vocab_size}"),
        (reason is not FinishReason.LENGTH or len(ids) == limit, f"it ended at its limit {limit} with {len(ids)} ids"),
        (reason is not FinishReason.STOP or len(ids) > 0, "it stopped without an id"),
    ]
    for ok, complaint in rules:
        if not ok:
            raise EngineError(f"the reply to {rid} is broken: {complaint}")
    return Generation(
        token_ids=ids.astype(np.int32),
        logprobs=logprobs,
        weights_versions=versions,
        finish_reason=reason,
        preempted=preempted,
    )


def _finish_reason(said: Mapping[str, Any]) -> FinishReason:
    return FinishReason(said["type"])


def _logprobs(entries: list[Any], ids: np.ndarray) -> np.ndarray:
    """f32[n]: the log-probabilities of a list of [logprob, id, text]."""
    named = [int(entry[1]) for entry in entries]
    if named != ids.tolist():
        raise ValueError(f"{len(entries)} log-probabilities for {len(ids)} ids, or for other ids")
    values = np.asarray([entry[0] for entry in entries], np.float32)
    if not np.all(np.isfinite(values)):
        raise DivergedError(f"the weights in use {DIVERGED}: log-probability {values[~np.isfinite(values)][0]}")
    return values


def _versions(meta: Mapping[str, Any], count: int) -> np.ndarray:
    """i32[n]: the version behind each id, from the spans of the engine where it gives any, else one for all."""
    spans = meta.get("weight_versions")
    if spans is None:
        return np.full(count, version_number(meta["weight_version"]), np.int32)
    versions, at = np.full(count, -1, np.int32), 0
    for span in spans:
        start, end = int(span["start"]), min(int(span["end"]), count)
        if start != at and start < count:
            raise ValueError(f"spans {spans} leave ids without a version")
        versions[start:end], at = version_number(span["version"]), end
    if at != count:
        raise ValueError(f"spans {spans} cover {at} of {count} ids")
    return versions


def version_number(said: Any) -> int:
    """A weight version as a number; -1 for whatever a server calls weights that it did not get from us."""
    return int(said) if re.fullmatch(r"\d{1,9}", str(said)) else -1


def scores(reply: Any, ids: np.ndarray) -> np.ndarray:
    """f32[n]: log-probability of each id of a text given those before it, from a reply to `score_body`.

    Raises:
        EngineError: the reply is not a whole answer.
    """
    try:
        entries = reply["meta_info"]["input_token_logprobs"]
        out = np.zeros(len(ids), np.float32)
        out[1:] = _logprobs(entries[1:], ids[1:])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"a score cannot be read ({error!r}): {str(reply)[:200]}") from error
    return out


def reply_to_generate(body: Mapping[str, Any], generation: Generation) -> dict[str, Any]:
    """What /generate answers: the reverse of `generation`."""
    ids, versions = generation.token_ids.tolist(), generation.weights_versions.tolist()
    reason: dict[str, Any] = {"type": generation.finish_reason.value}
    match generation.finish_reason:
        case FinishReason.STOP:
            reason["matched"] = ids[-1]
        case FinishReason.LENGTH:
            reason["length"] = len(ids)
        case FinishReason.ABORT:
            reason["message"] = "aborted"
    spans, start = [], 0
    for version, run in itertools.groupby(versions):
        end = start + len(list(run))
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    meta = {
        "id": body["rid"],
        "finish_reason": reason,
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": len(ids),
        "num_retractions": generation.preempted,
        "weight_versions": spans,
        "weight_version": spans[-1]["version"] if spans else "",
        "output_token_logprobs": [[p, i, None] for p, i in zip(generation.logprobs.tolist(), ids, strict=True)],
    }
    return {"output_ids": ids, "meta_info": meta}


def load(reply: Any) -> Load:
    """What an engine holds, from a reply of /v1/loads, added up over its data-parallel ranks.

    Raises:
        EngineError: the reply cannot be read.
    """
    try:
        ranks = reply["loads"]
        used = sum(int(rank["num_used_tokens"]) for rank in ranks)
        total = sum(int(rank["max_total_num_tokens"]) for rank in ranks)
        running = sum(int(rank["num_running_reqs"]) for rank in ranks)
        waiting = sum(int(rank["num_waiting_reqs"]) for rank in ranks)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"a load cannot be read ({error!r}): {str(reply)[:200]}") from error
    return Load(kv_tokens_used=used, kv_tokens_free=max(0, total - used), running=running, waiting=waiting)


def reply_to_loads(load: Load) -> dict[str, Any]:
    """What /v1/loads answers: the reverse of `load`."""
    rank = {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_used_tokens": load.kv_tokens_used,
        "max_total_num_tokens": load.kv_tokens_used + load.kv_tokens_free,
    }
    return {"loads": [rank]}


def is_untouched(refused: str) -> bool:
    """Whether an update was refused by all of a server's data-parallel ranks while their old weights were whole."""
    return all(UNTOUCHED in part for part in refused.split(" | "))


def refusal(text: str) -> str:
    """What a refusal says, out of its JSON where it is some."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        said = json.loads(text)
        text = str(said.get("message") or said.get("error") or said.get("detail") or text)
    return text[:2000]


def release(version: str) -> tuple[int, ...]:
    """The numbers of a release, so that two can be compared.

    >>> release("0.5.23.post1")
    (0, 5, 23)
    """
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(n) for n in numbers.group().split(".")) if numbers else ()
