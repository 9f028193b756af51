"""Trajectories as coloured text: one HTML page without any other file, that opens offline.

The stronger the colour, the higher the entropy of a token; a dark underline marks the fifth of highest entropy. Tool
calls stand on blue, what the loop appended (replies of tools) is grey. Every text is escaped: it is what a model wrote.

Deliberately not here: numbers (tokens.py), and scripts: folding is the browser's own.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from rstar2_jax.report import tokens
from rstar2_jax.types import Prompt

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #24292f; margin: 2rem auto; max-width: 68rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .6rem 0; } th, td { padding: .2rem .8rem; text-align: right; }
th { border-bottom: 1px solid #8c959f; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr:last-child.all td { border-top: 1px solid #d0d7de; font-weight: 600; }
.side { display: flex; gap: 3rem; flex-wrap: wrap; } code { background: #f3f5f8; padding: 0 .25rem; white-space: pre; }
details { border-top: 1px solid #d0d7de; padding: .5rem 0; } summary { cursor: pointer; }
.text { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0; }
.q { color: #57606a; white-space: pre-wrap; } .added { color: #8c959f; } .call { border-bottom: 2px solid #b6d4fe; }
.high { border-bottom: 2px solid #7a2e00; font-weight: 600; }
.right { color: #1a7f37; } .wrong { color: #cf222e; } .unscored { color: #8c959f; } img { max-width: 100%; }
"""


def page(
    title: str,
    notes: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    lists: Mapping[str, Sequence[Mapping[str, Any]]],
    readings: Sequence[tuple[Prompt, tokens.Reading]],
    curves_png: bytes | None = None,
) -> str:
    """The page.

    Args:
        notes: sentences below the title: what was read, by which weights.
        rows: see tokens.table.
        lists: see tokens.frequent, by their headings.
        readings: each with the problem that it answers.
        curves_png: a figure to show.
    """
    top = max((t.entropy for _, r in readings for turn in r.turns for t in turn if t.kind is not None), default=0.0)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(note)}</p>" for note in notes),
        "<h2>Entropy by kind of token</h2>",
        _table(rows),
        '<div class="side">',
        *(f"<div><h2>{html.escape(heading)}</h2>{_frequent(entries)}</div>" for heading, entries in lists.items()),
        "</div>",
    ]
    if curves_png is not None:
        data, what = base64.b64encode(curves_png).decode(), "response length, tool errors and reward"
        parts += ["<h2>Curves</h2>", f'<img alt="{what}" src="data:image/png;base64,{data}">']
    parts += [f"<h2>{len(readings)} trajectories</h2>", _legend(top)]
    parts += [_trajectory(number, prompt, reading, top) for number, (prompt, reading) in enumerate(readings)]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ("tokens", "of all", "mean entropy", "median", "high", "of all high")
    lines = ["<table><tr><th>kind</th>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for row in rows:
        cells = [
            f"{row['tokens']:,}", _percent(row["share"]), _nats(row["entropy_mean"]), _nats(row["entropy_median"]),
            _percent(row["high_share"]), _percent(row["share_of_high"]),
        ]  # fmt: skip
        kind = ' class="all"' if row["kind"] == "all" else ""
        shown = "".join(f"<td>{cell}</td>" for cell in (html.escape(row["kind"]), *cells))
        lines.append(f"<tr{kind}>{shown}</tr>")
    return "\n".join(lines) + "</table>"


def _frequent(entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return "<p>none</p>"
    lines = ["<table><tr><th>text</th><th>high</th><th>occurs</th><th>entropy</th></tr>"]
    for entry in entries:
        shown = html.escape(_visible(entry["text"]))
        numbers = f"<td>{entry['high']}</td><td>{entry['occurs']}</td><td>{_nats(entry['entropy_mean'])}</td>"
        lines.append(f"<tr><td><code>{shown}</code></td>{numbers}</tr>")
    return "\n".join(lines) + "</table>"


def _legend(top: float) -> str:
    steps = [index / 4 * top for index in range(5)]
    boxes = "".join(f'<span style="{_colour(value, top)}"> {value:.2f} </span>' for value in steps)
    named = {"high": "highest fifth", "call": "tool call", "added": "appended by the loop"}
    marks = "  ".join(f'<span class="{name}">{text}</span>' for name, text in named.items())
    return f'<p class="text">entropy in nats: {boxes}  {marks}</p>'


def _trajectory(number: int, prompt: Prompt, reading: tokens.Reading, top: float) -> str:
    trajectory = reading.trajectory
    verdict = "unscored" if trajectory.verdict is None else trajectory.verdict.value
    kind = {"correct": "right", "wrong": "wrong"}.get(verdict, "unscored")
    statuses = [result.status.value for turn in trajectory.turns for result in turn.results]
    calls = f", calls: {', '.join(statuses)}" if statuses else ", no call"
    body = "".join(_token(token, top) for turn in reading.turns for token in turn)
    return (
        f'<details{" open" if number < 3 else ""}><summary><b>{number + 1}</b> <span class="{kind}">{verdict}</span> '
        f"{html.escape(prompt.source)}, {trajectory.num_sampled_tokens} sampled tokens{html.escape(calls)}</summary>\n"
        f'<div class="q">{html.escape(prompt.question)} &nbsp;[{html.escape(prompt.answer)}]</div>'
        f'<div class="text">{body}</div></details>'
    )


def _token(token: tokens.Token, top: float) -> str:
    text = html.escape(token.text)
    if token.kind is None:
        return f'<span class="added">{text}</span>'
    if not text:
        return ""
    names = [name for name, is_one in (("call", token.kind is tokens.Kind.CODE), ("high", token.high)) if is_one]
    shown = f' class="{" ".join(names)}"' if names else ""
    told = f"{token.kind.value}: entropy {token.entropy:.3f}, log p {token.logprob:.3f}"
    return f'<span{shown} style="{_colour(token.entropy, top)}" title="{told}">{text}</span>'


def _colour(entropy: float, top: float) -> str:
    """By the square root: most entropies are small, and one large one would leave all others white."""
    strength = 0.0 if top <= 0 else min(1.0, max(0.0, entropy / top)) ** 0.5
    return f"background: rgba(240, 120, 20, {0.75 * strength:.2f})"


def _visible(text: str) -> str:
    """White space as something that can be seen."""
    return text.replace("\n", "\u23ce").replace("\t", "\u21e5").replace(" ", "\u2423") or "(part of a character)"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
