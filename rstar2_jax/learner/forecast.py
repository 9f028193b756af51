"""From a plan to a page: bytes by kind, floating-point work, seconds at given rates, room for the rollout, a verdict.

Floating-point work is counted from the sizes, in multiples of 2 for a product and a sum:
    forward of a token   2 * (entries of the layers' kernels) + 2 * layers * heads * head_dim * T  (causal: half of T^2)
    head of a token      2 * d_model * vocab_size
    training             3 forwards of both, one more of the layers with remat, one more of the head (logits again)

Seconds of communication are not overlapped with work here; on devices most of them are. Inside a node each device has
a link to every other: a ring among m of them uses m - 1 of its links. A group over several nodes has the network cards
of all its members: with m members in each node m cards carry what passes between two nodes, so that each member sends
at m times the rate of one card, or at that of its links to the m - 1 others where this is less. Decoding reads the
weights once for each batch of tokens and the keys and values of each context: its roofline is the memory's bandwidth.

Deliberately not here: compiling (plan.py).
"""

from __future__ import annotations

import collections
import math

from rstar2_jax import hardware, settings
from rstar2_jax.learner import plan as plans

EFFICIENCY = 0.4  # share of the peak rate that training reaches
ENGINE_SHARE = 0.9  # of a device's memory that an engine may fill
MARGIN = 0.75  # of a device's memory that a plan may fill: what is not counted needs the rest


def kernel_entries(model: settings.Model) -> int:
    """Entries of all projections of all layers."""
    attention = 2 * model.d_model * (model.heads + model.kv_heads) * model.head_dim
    return model.layers * (attention + 3 * model.d_model * model.d_mlp)


def micro_step_flops(model: settings.Model, learner: settings.Learner) -> float:
    """Floating-point operations of one full micro-batch, all devices together, every token trained."""
    attention = 2 * model.layers * model.heads * model.head_dim * learner.row_tokens
    head = 2 * model.d_model * model.vocab_size
    whole = 2 * kernel_entries(model) + attention
    again = {"none": 0, "block": 2 * kernel_entries(model), "full": whole, "offload": whole}
    token = 3 * whole + again[learner.remat] + 4 * head
    return float(token) * learner.microbatch_rows * learner.row_tokens


def kv_bytes(model: settings.Model) -> int:
    """Bytes of keys and values of one token, in the compute dtype, all layers."""
    width = 2 if model.compute_dtype == "bfloat16" else 4
    return 2 * model.layers * model.kv_heads * model.head_dim * width


def verdict(plan: plans.Plan, learner: settings.Learner) -> str:
    """`fits` or `does not fit`, with the setting to change; empty where the device's memory is not known."""
    memory = learner.device.memory_bytes
    if not memory:
        return ""
    share = plan.peak / memory
    told = f"{_size(plan.peak)} of {_size(memory)} a device ({share:.0%}; up to {MARGIN:.0%} is taken as safe)"
    if share <= MARGIN:
        return f"fits: {told}"
    word = "does not fit" if share > 1 else "does not fit safely"
    return f"{word}: {told}; {_remedy(plan, learner)}"


def _remedy(plan: plans.Plan, learner: settings.Learner) -> str:
    data, fsdp, tensor = learner.mesh
    rows = learner.microbatch_rows // (data * fsdp)
    if plan.arguments > MARGIN * learner.device.memory_bytes:
        other = " or set Learner.offload = 'moments'" if learner.offload == "none" else ""
        taken = _size(plan.arguments)
        return f"state and gradients alone take {taken}: raise fsdp in Learner.mesh = {learner.mesh}{other}"
    if learner.remat not in ("full", "offload"):
        return f"activations take the most: set Learner.remat = 'full' (now {learner.remat!r})"
    if rows > 1:
        return (
            f"activations of {rows} rows a device take the most: lower Learner.microbatch_rows = "
            f"{learner.microbatch_rows} to {data * fsdp}"
        )
    if tensor > 1 and not learner.sharding.sequence:
        return "activations of whole rows take the most: set Sharding.sequence = ('tensor',)"
    if learner.remat == "full":
        return "one row's activations take the most: set Learner.remat = 'offload', which keeps inputs on the hosts"
    return f"one row is too long for a device: raise tensor in Learner.mesh = {learner.mesh}, or lower row_tokens"


def lines(plan: plans.Plan, model: settings.Model, learner: settings.Learner) -> list[str]:
    """The learner's part of the page."""
    data, fsdp, tensor = learner.mesh
    flops = micro_step_flops(model, learner)
    shape = f"{learner.microbatch_rows} rows of {learner.row_tokens:,} tokens"
    away = f"    layers' inputs                {_size(plan.inputs_away):>10}  in its host's memory, not on the device"
    page = [
        f"learner: {plan.parameters:,} parameters on {plan.devices} devices (data {data}, fsdp {fsdp}, tensor "
        f"{tensor}), micro-batches of {shape}, remat {learner.remat}",
        "  bytes on a device, exact:",
        f"    parameters (float32)          {_size(plan.params):>10}",
        f"    Adam's moments (float32)      {_size(plan.moments):>10}{_away(plan)}",
        f"    sum of gradients (float32)    {_size(plan.gradients):>10}",
        f"    one micro-batch               {_size(plan.batch):>10}",
        "  temporaries, upper bound (bfloat16 is planned as float32 here):",
        f"    micro-step                    {_size(plan.micro_step):>10}",
        f"    optimizer step                {_size(plan.optimizer_step):>10}",
        away if plan.inputs_away else "",
        f"    largest single array          {_size(plan.widest[0]):>10}  {plan.widest[1]}",
        "  not counted: buffers of the collective library, fragmentation, the runtime, an engine on the same devices",
        f"  work of a full micro-step       {flops / 1e15:>10.3f} PFLOP, {flops / 1e15 / plan.devices:.4f} a device",
        "  collectives, in float32 where the device would send bfloat16:",
    ]
    device = learner.device
    for one in plan.traffic:
        nodes, _ = _spread(one, device)
        where = f" of {nodes} node{'s' if nodes > 1 else ''}" if device.flops else ""
        told = f"{one.count:>6} x, {_size(one.size)} a device among {len(one.groups[0])}{where}"
        page.append(f"    {one.kind:<29} {told}")
    if device.flops:
        work = flops / plan.devices / device.flops / EFFICIENCY
        inside, between = wire_seconds(plan, device)
        page.append(
            f"  seconds of a full micro-step    {work:>10.2f} at {EFFICIENCY:.0%} of {device.flops / 1e12:.0f} "
            f"TFLOP/s; if nothing overlaps {inside:.2f} inside nodes at {device.node_bytes_per_s / 1e9:.0f} GB/s, "
            f"{between:.2f} between them at {device.link_bytes_per_s / 1e9:.0f} a card"
        )
    return [line for line in (*page, verdict(plan, learner)) if line]


def wire_seconds(plan: plans.Plan, device: hardware.Device) -> tuple[float, float]:
    """Seconds that the collectives of a micro-step take inside nodes, and between nodes; the device must be known."""
    inside = between = 0.0
    for one in plan.traffic:
        nodes, members = _spread(one, device)
        links = device.node_bytes_per_s * max(1, members - 1) / max(1, device.node_devices - 1)
        if nodes == 1:
            inside += one.sent / links
        elif members == 1:
            between += one.sent / device.link_bytes_per_s
        else:
            between += one.sent / min(links, members * device.link_bytes_per_s)
    return inside, between


def _spread(traffic: plans.Traffic, device: hardware.Device) -> tuple[int, int]:
    """(nodes, fewest members in one of them) of the group that is spread the widest."""
    split = [collections.Counter(place // max(device.node_devices, 1) for place in group) for group in traffic.groups]
    return max(((len(nodes), min(nodes.values())) for nodes in split), key=lambda found: (found[0], -found[1]))


def _away(plan: plans.Plan) -> str:
    return f"  and {_size(plan.offloaded)} in its host's memory" if plan.offloaded else ""


def rollout_lines(model: settings.Model, rollout: settings.Rollout, learner: settings.Learner | None) -> list[str]:
    """The rollout's part: keys and values, how many tokens of them fit, the roofline of a step's decoding."""
    each, longest = kv_bytes(model), rollout.max_prompt_tokens + rollout.max_response_tokens
    page = [
        f"rollout: {each:,} bytes of KV a token, {_size(each * longest * rollout.engine_slots)} for "
        f"{rollout.engine_slots} slots of {longest:,} tokens"
    ]
    if learner is None or not learner.device.memory_bytes:
        return page
    device, fleet = learner.device, rollout.fleet
    tensor = fleet.tensor_parallel if fleet.engines else 1
    replicas = len(fleet.addresses) if fleet.engines else math.prod(learner.mesh)
    head = model.d_model * model.vocab_size * (1 if model.tie_embeddings else 2)
    weights = 2 * (kernel_entries(model) + head)
    room = int(ENGINE_SHARE * device.memory_bytes * tensor - weights)
    if room <= 0:
        each_on = f"{tensor} device{'s' if tensor > 1 else ''} each"
        remedy = "name servers of more devices in Fleet.engines and Fleet.tensor_parallel"
        return [*page, f"  weights of {_size(weights)} do not fit on {each_on}: {remedy}"]
    if not (rollout.fleet.engines or rollout.fleet.replicas):
        page += _embedded(weights, each * longest, rollout.engine_slots, learner)
    capacity = room // each
    episodes = rollout.prompts_per_step * rollout.oversample
    together = min(episodes / replicas, capacity / longest)
    read = weights / together + each * (rollout.max_prompt_tokens + rollout.max_response_tokens / 2)
    seconds = episodes * rollout.max_response_tokens * read / (device.memory_bytes_per_s * tensor * replicas)
    return [
        *page,
        f"  engines alone on {replicas} x {tensor} devices: {capacity:,} tokens of KV each, {capacity // longest:,} "
        f"episodes of full length at once; decoding a step of {episodes:,} such episodes takes {seconds:,.0f} s at "
        f"{device.memory_bytes_per_s / 1e12:.1f} TB/s",
    ]


def _embedded(weights: int, slot: int, slots: int, learner: settings.Learner) -> list[str]:
    """A warning where the engine inside the trainer, which lies on one device, is too large for it."""
    state = 8 * weights / (learner.mesh[1] * learner.mesh[2])  # float32 parameters, gradients and two moments
    free = ENGINE_SHARE * learner.device.memory_bytes - weights - state
    if slots * slot <= free:
        return []
    return [
        f"  does not fit: the engine inside the trainer lies on one device, where {_size(max(free, 0))} are left for "
        f"{_size(slots * slot)} of KV: lower Rollout.engine_slots to {max(0, int(free // slot))}, or name servers in "
        "Fleet.engines"
    ]


def _size(count: float | int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
