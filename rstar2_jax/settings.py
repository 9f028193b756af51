"""Frozen settings: what a run in gin/ may say. Checked at birth, hashable, so that they are static jit arguments.

Units stand in the names. A setting exists when two runs in gin/ differ in it; all else is a constant beside its use.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from rstar2_jax import corpus, hardware, hosts, ranges

Curation = corpus.Curation  # bound in gin like the settings below
Demonstrations = corpus.Demonstrations
Device = hardware.Device
Endpoint = hosts.Endpoint
Fleet = hosts.Fleet
Sandbox = hardware.Sandbox
Sharding = hardware.Sharding
Family = Literal["llama", "qwen2", "qwen3"]
SLOWEST_TOKENS_PER_S = 10  # of one stream; an engine below that is held for ill
LEAST_TEMPERATURE = 1e-6  # logits divided by far less overflow to NaN log-probabilities; SGLang's bound too


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Where a run lives, how long it is and where its first weights come from.

    Args:
        workdir: folder for everything the run writes; a run found there is continued.
        seed: root of all randomness.
        steps: optimizer steps (RL) or SFT steps of the whole run.
        init_from: folder of a finished run or of a Hugging Face checkpoint; empty starts from random weights.
        optimizer_start: what becomes of the optimizer of `init_from`: `reset` (moments at zero; the paper's stage 3),
            `restart` (its moments, the schedule warms up again) or `continue` (its moments and its schedule).
        save_every_steps: checkpoint interval; the last step is always saved.
        keep_checkpoints: newest checkpoints kept.
    """

    workdir: str
    seed: int = 0
    steps: int
    init_from: str = ""
    optimizer_start: Literal["reset", "restart", "continue"] = "reset"
    save_every_steps: int = 10
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        ranges.check(bool(self.workdir), self, "workdir", "must name a folder")
        ranges.one_of(self, "optimizer_start", ("reset", "restart", "continue"))
        ranges.positive(self, "save_every_steps", "keep_checkpoints")
        ranges.check(self.steps >= 0, self, "steps", "must be 0 or more")
        ranges.check(0 <= self.seed < 2**31, self, "seed", "must be in [0, 2**31)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Sizes of a decoder. Qwen2 has biases on q, k, v; Qwen3 has an RMS norm on q and k; Llama has neither.

    Args:
        compute_dtype: dtype of activations and matmuls; parameters are float32 masters.
    """

    family: Family
    vocab_size: int
    d_model: int
    d_mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    max_positions: int
    compute_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        ranges.one_of(self, "family", ("llama", "qwen2", "qwen3"))
        ranges.one_of(self, "compute_dtype", ("float32", "bfloat16"))
        ranges.positive(
            self, "vocab_size", "d_model", "d_mlp", "layers", "heads", "kv_heads", "head_dim", "max_positions"
        )
        ranges.positive(self, "rope_theta", "rms_eps")
        ranges.check(
            self.heads % self.kv_heads == 0, self, "heads", f"must be a multiple of kv_heads = {self.kv_heads}"
        )
        ranges.check(self.head_dim % 2 == 0, self, "head_dim", "must be even (rotary halves)")

    @property
    def qkv_bias(self) -> bool:
        """True when q, k and v projections carry a bias."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """True when q and k are RMS-normalised per head."""
        return self.family == "qwen3"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The problems and how the model sees them.

    Args:
        source: where problems come from: `box`, `gsm_symbolic`, a published set (data/catalog.py lists them), `jsonl`
            (a file or folder of one's own, JSON lines or Parquet) or `hub:<name>`.
        path: file or folder of that source where it needs one; empty reads a published set from the hub.
        difficulty: stage of a generated source (1, 2 or 3; gsm_symbolic: solutions of at most 2 steps, at most 4, any);
            ignored by fixed data sets.
        families: names of generated families; empty means all that the source trains on.
        tokenizer: `box` for the built-in one, or a folder that holds tokenizer.json.
        template: `rstar2`, `box`, or a path to a jinja file or to a folder that ships one.
        tools: what the model may call, each at most once; none for a model without tools: `python` (every call starts
            afresh), `session` (Python that keeps what earlier calls of the trajectory defined), `octave` and `sql`.
        tool_name: name under which the Python tool is offered.
    """

    source: str
    path: str = ""
    difficulty: int = 1
    families: tuple[str, ...] = ()
    tokenizer: str
    template: str = "rstar2"
    tools: tuple[str, ...] = ("python",)
    tool_name: str = "execute_python_code_with_standard_io"

    def __post_init__(self) -> None:
        ranges.check(bool(self.source), self, "source", "must name a source of problems")
        ranges.check(bool(self.tokenizer), self, "tokenizer", "must be 'box' or a folder with tokenizer.json")
        ranges.check(self.difficulty in (1, 2, 3), self, "difficulty", "must be 1, 2 or 3")
        known = ("python", "session", "octave", "sql")
        right = set(self.tools) <= set(known) and len(set(self.tools)) == len(self.tools)
        ranges.check(right, self, "tools", f"must be some of {', '.join(known)}, each once")
        ranges.check(
            not {"python", "session"} <= set(self.tools), self, "tools", "python and session have one name: choose"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exam:
    """Held-out problems that training asks from time to time: does what it gains hold elsewhere?

    Args:
        task: where they come from; tokenizer, template and tool are those of training.
        every_steps: asked before the update of each so-manieth step; 0 is never.
        problems: how many (the same ones each time).
        samples: answers to each problem.
        stop_on_collapse: end the run when the guards see a collapse (report/guards.py); else they only say so.
    """

    task: Task
    every_steps: int = 0
    problems: int = 30
    samples: int = 1
    stop_on_collapse: bool = False

    def __post_init__(self) -> None:
        ranges.check(self.every_steps >= 0, self, "every_steps", "must be 0 (never) or more")
        ranges.positive(self, "problems", "samples")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """How trajectories are generated.

    Args:
        prompts_per_step: live groups that one step trains on.
        group_size: G, rollouts kept for each prompt.
        oversample: rollouts generated for each prompt (the paper's 2G); equal to group_size switches RoC off.
        max_response_tokens: budget of one episode after its prompt, tool replies included.
        max_reply_tokens: budget of one tool reply; head and tail are kept.
        engine_slots: rows of the decode batch; one shape for the whole run (batch invariance).
        prefill_chunk_tokens: columns of the prefill batch; one shape for the whole run.
        deadline_s: limit on any single wait of an episode (engine turn, tool call, grading). A run is refused where a
            turn that takes the whole budget could not meet it at 10 tokens a second (longest_turn_s): such episodes are
            lost, and they are the long ones. It is no watch over engines: Fleet.progress_s is.
        max_staleness: steps that generation may run ahead of training; 0 is the synchronous loop of the paper.
        over_issue: share of further prompts asked beyond those needed, so that a step ends without its slowest groups,
            which are dropped and counted; 0 is off. What a step trains on depends on the clock then.
    """

    prompts_per_step: int
    group_size: int
    oversample: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_prompt_tokens: int
    max_response_tokens: int
    max_turns: int
    max_calls_per_turn: int = 4
    max_reply_tokens: int = 512
    engine_slots: int = 16
    prefill_chunk_tokens: int = 32
    deadline_s: float = 600.0
    max_staleness: int = 0
    over_issue: float = 0.0
    fleet: Fleet = Fleet()

    def __post_init__(self) -> None:
        ranges.positive(self, "prompts_per_step", "group_size", "max_prompt_tokens", "max_response_tokens", "max_turns")
        ranges.positive(
            self, "max_calls_per_turn", "max_reply_tokens", "engine_slots", "prefill_chunk_tokens", "deadline_s"
        )
        ranges.check(
            self.oversample >= self.group_size, self, "oversample", f"must be >= group_size = {self.group_size}"
        )
        rule = f"must be {LEAST_TEMPERATURE:g} or more (1.0 is the policy itself)"
        ranges.check(self.temperature >= LEAST_TEMPERATURE, self, "temperature", rule)
        ranges.check(0 < self.top_p <= 1, self, "top_p", "must be in (0, 1]")
        ranges.check(self.max_staleness >= 0, self, "max_staleness", "must be 0 (synchronous) or more steps")
        ranges.check(0 <= self.over_issue <= 10, self, "over_issue", "must be 0 (off) or a share up to 10")
        ranges.check(self.top_k == -1 or self.top_k > 0, self, "top_k", "must be above 0, or -1 for off")

    @property
    def longest_turn_s(self) -> float:
        """Seconds that a turn of the whole budget takes at the slowest rate that is no fault, 10 tokens a second."""
        return self.max_response_tokens / SLOWEST_TOKENS_PER_S


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Roc:
    """Resample-on-Correct: which G of the oversampled rollouts are trained on.

    Args:
        positives: `inverse` (weight 1 / (p_total + p_floor), the paper), `greedy` (lowest penalty first, as released)
            or `uniform` (penalty-blind control).
        min_class: rows kept of a class that is present.
        p_floor: added to the penalty before it is inverted.
        reject_equal: drop groups whose rewards are all equal.
        max_refills: further rounds of prompts sampled to fill the step with live groups.
        max_unscored: share of unscored rollouts above which the step is abandoned with the weights unchanged.
        by_class: keep both outcomes in the proportion that they had; False draws G of all, blind to the outcome too.
        repetition_weight: the share of repeated n-grams, times this, is added to the penalty (the paper: it hurts).
        truncated: rollouts cut off by a limit are kept as `negative`, or `masked`: overlong filtering, they count in
            their group's statistics and are not trained on (the paper: it hurts).
    """

    positives: Literal["inverse", "greedy", "uniform"] = "inverse"
    min_class: int = 1
    p_floor: float = 0.1
    reject_equal: bool = True
    max_refills: int = 0
    max_unscored: float = 0.1
    by_class: bool = True
    repetition_weight: float = 0.0
    truncated: Literal["negative", "masked"] = "negative"

    def __post_init__(self) -> None:
        ranges.one_of(self, "positives", ("inverse", "greedy", "uniform"))
        ranges.one_of(self, "truncated", ("negative", "masked"))
        ranges.check(self.repetition_weight >= 0, self, "repetition_weight", "must be 0 (off) or more")
        blind = self.by_class or (self.positives == "uniform" and self.repetition_weight == 0)
        ranges.check(
            blind, self, "by_class", "False draws without any weight: set positives = 'uniform', repetition_weight = 0"
        )
        ranges.check(self.min_class >= 0, self, "min_class", "must be 0 or more")
        # Beyond these its inverse is no number of single precision, and flawless rollouts are no longer drawn alike.
        ranges.check(1e-30 <= self.p_floor <= 1e30, self, "p_floor", "must be above 0, in [1e-30, 1e30]")
        ranges.check(self.max_refills >= 0, self, "max_refills", "must be 0 or more")
        ranges.check(0 <= self.max_unscored <= 1, self, "max_unscored", "must be in [0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The GRPO loss and the advantages under it; defaults are the paper's.

    Args:
        aggregation: `token_mean` (sum over all trained tokens of the global batch) or `seq_mean` (GRPO Eq. 1).
        dual_clip: upper bound on -ratio * A for negative advantages; 0 is off.
        high_entropy_share: train only on this share of tokens of highest entropy; 1 is off.
        correction: rollout/trainer mismatch: `off`, `token` (truncated importance sampling), `band` (the same, but
            tokens beyond the cap are left out) or `sequence` (masking).
        correction_cap: cap of the token weights, or bound on the sequence's ratio.
        ddof, advantage_eps: of the standard deviation in the advantages.
    """

    eps_low: float = 0.2
    eps_high: float = 0.28
    aggregation: Literal["token_mean", "seq_mean"] = "token_mean"
    dual_clip: float = 0.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    high_entropy_share: float = 1.0
    correction: Literal["off", "token", "band", "sequence"] = "off"
    correction_cap: float = 2.0
    ddof: int = 0
    advantage_eps: float = 0.0

    def __post_init__(self) -> None:
        ranges.one_of(self, "aggregation", ("token_mean", "seq_mean"))
        ranges.one_of(self, "correction", ("off", "token", "band", "sequence"))
        ranges.check(0 <= self.eps_low < 1, self, "eps_low", "must be in [0, 1)")
        ranges.check(self.eps_high >= 0, self, "eps_high", "must be 0 or more")
        ranges.check(self.dual_clip == 0 or self.dual_clip > 1, self, "dual_clip", "must be above 1, or 0 for off")
        ranges.check(self.kl_coef >= 0, self, "kl_coef", "must be 0 or more")
        ranges.check(math.isfinite(self.entropy_coef), self, "entropy_coef", "must be a finite number")
        ranges.check(0 < self.high_entropy_share <= 1, self, "high_entropy_share", "must be in (0, 1]")
        ranges.check(self.correction_cap >= 1, self, "correction_cap", "must be 1 or more")
        ranges.check(self.ddof in (0, 1), self, "ddof", "must be 0 or 1")
        ranges.check(self.advantage_eps >= 0, self, "advantage_eps", "must be 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """AdamW with warm-up. The rate is a pure function of the stage's own step (see algo/optimizer.py)."""

    lr: float
    warmup_steps: int = 20
    schedule: Literal["constant", "cosine"] = "constant"
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    b1: float = 0.9
    b2: float = 0.999

    def __post_init__(self) -> None:
        ranges.one_of(self, "schedule", ("constant", "cosine"))
        ranges.check(self.lr >= 0, self, "lr", "must be 0 or more")
        ranges.check(self.warmup_steps >= 0, self, "warmup_steps", "must be 0 or more")
        ranges.check(math.isfinite(self.lr), self, "lr", "must be a finite number")
        ranges.check(0 <= self.weight_decay <= 1e6, self, "weight_decay", "must be in [0, 1e6]")
        # What single precision rounds to 1 divides by 1 - b = 0.
        ranges.check(0 <= self.b1 <= 1 - 1e-7, self, "b1", "must be in [0, 1 - 1e-7]")
        ranges.check(0 <= self.b2 <= 1 - 1e-7, self, "b2", "must be in [0, 1 - 1e-7]")
        ranges.positive(self, "max_grad_norm")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """How one rollout batch becomes an update, and over which mesh.

    Args:
        microbatch_rows: rows of one forward and backward; changes memory, never the result.
        row_tokens: length of a packed row; at least the longest episode.
        minibatches: optimizer steps for each rollout batch (1 keeps every ratio at 1).
        mesh: devices along (data, fsdp, tensor).
        sharding: which of these axes split what.
        remat: what a layer keeps for the backward pass: `none` (all of it), `block` (its input and its attention),
            `full` (its input alone) or `offload` (that in the memory of the hosts); less memory, more seconds.
        offload: `moments` keeps Adam's in the memory of the hosts, 8 bytes a parameter less on the devices; `none`.
        attention: `portable`, or a device's fused kernel (`aiter`, `transformer_engine`: model/fused.py).
        device: what the plan of --dry_run is held against.
    """

    optimizer: Optimizer
    loss: Loss = Loss()
    microbatch_rows: int = 8
    row_tokens: int
    minibatches: int = 1
    mesh: tuple[int, int, int] = (1, 1, 1)
    sharding: Sharding = Sharding()
    remat: Literal["none", "block", "full", "offload"] = "none"
    offload: Literal["none", "moments"] = "none"
    attention: Literal["portable", "aiter", "transformer_engine"] = "portable"
    device: Device = Device()

    def __post_init__(self) -> None:
        ranges.positive(self, "microbatch_rows", "row_tokens", "minibatches")
        ranges.one_of(self, "remat", ("none", "block", "full", "offload"))
        ranges.one_of(self, "offload", ("none", "moments"))
        ranges.one_of(self, "attention", ("portable", "aiter", "transformer_engine"))
        ranges.check(
            len(self.mesh) == 3 and all(n > 0 for n in self.mesh), self, "mesh", "must be three counts above 0"
        )
        axes: dict[str, int] = dict(zip(("data", "fsdp", "tensor"), self.mesh, strict=True))
        shards = math.prod(axes[name] for name in self.sharding.rows)
        rule = f"must be a multiple of {' * '.join(self.sharding.rows)} = {shards}"
        ranges.check(self.microbatch_rows % shards == 0, self, "microbatch_rows", rule)
