"""Other people's clients against the endpoint: OpenAI's, and sgl-eval, whose verdicts are held against our grader's.

They run in an environment of their own (`make harness-env`); the model is trained here, for a minute, so that some of
its answers are right and some are wrong.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import http.server
import json
import os
import pathlib
import subprocess
import threading
import urllib.request

import pytest

from rstar2_jax import settings
from rstar2_jax.data import prompts
from rstar2_jax.io import trajectories
from rstar2_jax.reward import outcome
from rstar2_jax.types import Verdict
from rstar2_sandbox import client as sandbox_client
from tests.completions import test_process as processes

pytestmark = [pytest.mark.harness, pytest.mark.e2e, pytest.mark.slow]

BIN = pathlib.Path(os.environ.get("VENV_HARNESS", processes.REPOSITORY / ".venv-harness")) / "bin"
FAMILIES = ("gcd",)
PROBLEMS, REPEATS = 24, 4
LONG = ["settings.Model.max_positions=4096", "MAX_PROMPT_TOKENS=3000"]  # an AIME problem is long, letter by letter

OPENAI = """
import asyncio, json, sys
import openai

url = sys.argv[1]
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
(model,) = [card.id for card in client.models.list()]
asked = {"model": model, "messages": [{"role": "user", "content": "gcd(12, 18)"}], "seed": 4}
whole = client.chat.completions.create(**asked, n=2)
stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
chunks = list(stream)
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
thought = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks if c.choices)
refusals = {}
for name, value in {"presence_penalty": 1, "model": "gpt", "max_tokens": 10**6}.items():
    try:
        client.chat.completions.create(**{**asked, name: value})
    except openai.APIStatusError as error:
        refusals[name] = [type(error).__name__, error.status_code, error.param, error.code]


async def many():
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as hurried:
        return await asyncio.gather(*(hurried.chat.completions.create(**asked) for _ in range(16)))


together = {reply.choices[0].message.content for reply in asyncio.run(many())}
print(json.dumps({
    "model": model, "whole": whole.model_dump(), "text": text, "thought": thought, "refusals": refusals,
    "usage": chunks[-1].usage.model_dump(), "finish": [c.choices[0].finish_reason for c in chunks if c.choices][-1],
    "together": list(together),
}))
"""


@pytest.fixture(scope="module", autouse=True)
def environment_of_harnesses():
    """The environment, or no test."""
    if not (BIN / "sgl-eval").is_file():
        pytest.skip("no environment for sgl-eval: run `make harness-env`")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    """(url, name, folder) of a model that has just learned a part of one family."""
    root = tmp_path_factory.mktemp("harness")
    overlays, processes.OVERLAYS = processes.OVERLAYS, ["scale/box.gin", "model/box.gin"]
    try:
        bindings = [f"settings.Task.families={FAMILIES}", "settings.Run.steps=150"]
        said = processes.command("sft.gin", "", root / "sft", *bindings)
        done = subprocess.run(said, env=processes.environment(), capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        with processes.running(root / "sft", root / "endpoint", *LONG) as (url, _):
            yield url, "sft", root / "sft"
    finally:
        processes.OVERLAYS = overlays


def harness(*command, timeout=600):
    """What a program of the environment prints."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sgl_eval(endpoint, out, *flags):
    """(metrics, one record a sample) of a run of sgl-eval on AIME 2025 or on a file in its place."""
    url, name, _ = endpoint
    harness(
        str(BIN / "sgl-eval"), "run", "aime25", "--base-url", f"{url}/v1", "--model", name, "--out-dir", str(out),
        "--temperature", "1.0", "--top-p", "1.0", *flags,
    )  # fmt: skip
    (folder,) = out.glob("sgl_eval_aime25_*")
    lines = [line for path in sorted(folder.glob("output-rs*.jsonl")) for line in path.read_text().splitlines()]
    return json.loads((folder / "metrics.json").read_text()), [json.loads(line) for line in lines]


def ask_bare(tmp_path, problems):
    """Flags by which sgl-eval asks these problems as they are."""
    rows = [{"id": p.id, "problem": p.question, "expected_answer": p.answer} for p in problems]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bare.yaml").write_text('user: "{problem}"\n')
    return ["--from-dataset", str(tmp_path / "problems.jsonl"), "--prompt", str(tmp_path / "bare.yaml")]


@contextlib.contextmanager
def by_seeds(url, seeds):
    """The url of a way to the endpoint on which the requests about a question take its listed seeds, one each."""

    class Forward(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body.get("seed") is None and body.get("n", 1) == 1
            body["seed"] = seeds[body["messages"][-1]["content"]].pop()
            self.tell(json.dumps(body).encode())

        def do_GET(self):
            self.tell(None)

        def tell(self, data):
            asked = urllib.request.Request(url + self.path, data=data, headers={"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=300) as reply:
                text = reply.read()
                self.send_response(reply.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forward) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_openai_s_client_gets_answers_streams_and_typed_errors(endpoint, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(OPENAI)
    found = json.loads(harness(str(BIN / "python"), str(script), endpoint[0]))
    first, second = found["whole"]["choices"]
    assert found["model"] == endpoint[1] and first["index"] == 0 and second["index"] == 1
    assert found["text"] == first["message"]["content"] and found["finish"] == first["finish_reason"]
    assert found["thought"] == (first["message"].get("reasoning_content") or "")
    assert found["usage"]["completion_tokens"] > 0
    assert found["refusals"]["presence_penalty"] == ["BadRequestError", 400, "presence_penalty", "unsupported_value"]
    assert found["refusals"]["model"] == ["NotFoundError", 404, "model", "model_not_found"]
    assert found["refusals"]["max_tokens"] == ["BadRequestError", 400, "max_tokens", "context_length_exceeded"]
    assert found["together"] == [found["text"]]


def test_sgl_eval_runs_aime25(endpoint, tmp_path):
    metrics, samples = sgl_eval(endpoint, tmp_path, "--num-examples", "3", "--n-repeats", "2")
    assert metrics["num_examples"] == 3 and metrics["n_repeats"] == 2 and len(samples) == 6
    assert metrics["aggregate"]["error_rate"] == 0 and 0 <= metrics["aggregate"]["pass@1"] <= 1
    assert {sample["finish_reason"] for sample in samples} <= {"stop", "length"}
    assert all(sample["num_generated_tokens"] > 0 for sample in samples)


def test_sgl_eval_finds_the_pass_at_1_that_our_grader_finds_on_the_same_samples(endpoint, sandbox, tmp_path):
    task = settings.Task(source="box", tokenizer="box", template="box", families=FAMILIES)
    problems = list({p.question: p for p in prompts.eval_prompts(task, PROBLEMS, 0)}.values())
    metrics, samples = sgl_eval(endpoint, tmp_path / "out", *ask_bare(tmp_path, problems), "--n-repeats", str(REPEATS))
    assert len(samples) == REPEATS * len(problems)

    async def grades():
        items = [(s["generation"], s["expected_answer"], f"harness:{number}") for number, s in enumerate(samples)]
        async with sandbox_client.Client(sandbox.redis_url, run="harness-test") as client:
            return await outcome.grade(client, items)

    # As evaluate.py does: a truncated episode is wrong without grading.
    graded = zip(samples, asyncio.run(grades()), strict=True)
    ours = [s["finish_reason"] == "stop" and grade.verdict is Verdict.CORRECT for s, grade in graded]
    theirs = [sample["symbolic_correct"] for sample in samples]
    differing = [sample for sample, a, b in zip(samples, ours, theirs, strict=True) if a != b]
    assert differing == []
    assert metrics["aggregate"]["pass@1"] == pytest.approx(sum(ours) / len(ours))
    assert 0 < sum(ours) < len(ours)


def test_sgl_eval_reports_the_pass_at_1_of_evaluate_on_the_very_samples_of_that_evaluation(endpoint, tmp_path):
    url, name, folder = endpoint
    asked = [f"settings.Task.families={FAMILIES}", f"PROMPTS={PROBLEMS}", f"SAMPLES={REPEATS}", *LONG]
    said = processes.command("eval.gin", folder, tmp_path / "eval", *asked)
    done = subprocess.run(said, env=processes.environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    evaluated = json.loads((tmp_path / "eval" / "evaluation.json").read_text())["sets"]
    (number,) = [n for n, entry in enumerate(evaluated) if entry["set"] in FAMILIES]
    records = trajectories.read_step(tmp_path / "eval", number)
    seeds = collections.defaultdict(list)
    for record in records:
        seeds[record.prompt.question].append(record.trajectory.seed)
    problems = {record.prompt.question: record.prompt for record in records}.values()
    with by_seeds(url, seeds) as way:
        metrics, samples = sgl_eval(
            (way, name, folder), tmp_path / "out", *ask_bare(tmp_path, problems), "--n-repeats", str(REPEATS)
        )
    assert not any(seeds.values()) and len(samples) == len(records) == evaluated[number]["n"]
    for name in ("1", str(REPEATS)):
        assert metrics["aggregate"][f"pass@{name}"] == pytest.approx(evaluated[number]["pass_at"][name])
    assert sorted(s["num_generated_tokens"] for s in samples) == sorted(
        r.trajectory.num_sampled_tokens for r in records
    )
    assert 0 < metrics["aggregate"]["pass@1"] < 1
