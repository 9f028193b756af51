"""The policy loss: the worked example, exact micro-batch shares, masks, clipping, options, gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rstar2_jax import settings
from rstar2_jax.algo import loss

PLAIN = settings.Loss()
DUAL = settings.Loss(dual_clip=3.0)
SEQ = settings.Loss(aggregation="seq_mean")
EVERYTHING = settings.Loss(
    dual_clip=3.0, kl_coef=0.05, entropy_coef=0.01, high_entropy_share=0.5, correction="token", aggregation="seq_mean"
)

NO_EXTRAS = loss.Extras()

count_of = jax.jit(loss.normaliser, static_argnames="settings")
inverse_lengths = jax.jit(loss.inverse_lengths)
entropy_threshold = jax.jit(loss.entropy_threshold, static_argnames="share")


@functools.partial(jax.jit, static_argnames="how")
def loss_and_grad(policy, old, advantages, mask, normaliser, how, extras=NO_EXTRAS):
    def only_loss(values):
        return loss.policy_loss(values, old, advantages, mask, normaliser, how, extras)

    (value, statistics), grad = jax.value_and_grad(only_loss, has_aux=True)(policy)
    return value, statistics, grad


def random_batch(seed: int, rows: int = 8, tokens: int = 6) -> dict[str, np.ndarray]:
    """Rows of one or two sequences with forced tokens between and padding behind."""
    draw = np.random.default_rng(seed)
    segment_ids = np.zeros((rows, tokens), np.int32)
    for row in range(rows):
        first, second = draw.integers(1, tokens), draw.integers(0, 3)
        segment_ids[row, :first] = 1
        segment_ids[row, first : first + second] = 2
    mask = (segment_ids != 0) & (draw.uniform(size=segment_ids.shape) < 0.7)
    old = draw.normal(-1.5, 0.5, segment_ids.shape)
    batch = {
        "policy": old + draw.normal(0, 0.4, old.shape),
        "old": old,
        "advantages": draw.normal(0, 1, old.shape),
        "entropy": draw.uniform(0, 2, old.shape),
        "ref": old + draw.normal(0, 0.3, old.shape),
        "weights": draw.uniform(0.5, 2, old.shape),
    }
    return {k: v.astype(np.float32) for k, v in batch.items()} | {"mask": mask, "segment_ids": segment_ids}


def plain_loop(batch: dict[str, np.ndarray], how: settings.Loss, threshold: float) -> tuple[float, np.ndarray]:
    """Loss and gradient by float64 scalars, one token after another, sequences gathered by (row, segment)."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, column in zip(*np.nonzero(batch["mask"]), strict=True):
        groups.setdefault((int(row), int(batch["segment_ids"][row, column])), []).append(int(column))
    total = sum(len(columns) for columns in groups.values())
    value, grad = 0.0, np.zeros(batch["policy"].shape)
    for (row, _), columns in groups.items():
        share = 1 / len(columns) / len(groups) if how.aggregation == "seq_mean" else 1 / total
        for column in columns:
            policy, old, ref, a, weight, entropy = (
                float(batch[name][row, column]) for name in ("policy", "old", "ref", "advantages", "weights", "entropy")
            )
            ratio = np.exp(policy - old)
            bound = min(max(ratio, 1 - how.eps_low), 1 + how.eps_high)
            term, slope = (-ratio * a, -ratio * a) if ratio * a <= bound * a else (-bound * a, 0.0)
            if how.dual_clip and a < 0 and term > -how.dual_clip * a:
                term, slope = -how.dual_clip * a, 0.0
            if how.correction != "off":
                term, slope = term * weight, slope * weight
            if how.high_entropy_share < 1 and entropy < threshold:
                term, slope = 0.0, 0.0
            x = ref - policy
            term += how.kl_coef * (np.exp(x) - 1 - x) - how.entropy_coef * entropy
            slope += how.kl_coef * (1 - np.exp(x))
            value += share * term
            grad[row, column] += share * slope
    return value, grad


def whole(batch: dict[str, np.ndarray], how: settings.Loss) -> tuple[loss.Extras, jax.Array]:
    """Extras and normaliser of a global batch."""
    inverse = inverse_lengths(batch["mask"], batch["segment_ids"])
    extras = loss.Extras(
        entropy=batch["entropy"],
        ref_logprobs=batch["ref"],
        weights=batch["weights"] if how.correction != "off" else np.ones_like(batch["weights"]),
        inverse_lengths=inverse,
        entropy_threshold=entropy_threshold(batch["entropy"], batch["mask"], share=how.high_entropy_share),
    )
    return extras, count_of(batch["mask"], how, inverse)


def rows_of(extras: loss.Extras, rows) -> loss.Extras:
    return extras._replace(
        entropy=extras.entropy[rows],
        ref_logprobs=extras.ref_logprobs[rows],
        weights=extras.weights[rows],
        inverse_lengths=extras.inverse_lengths[rows],
    )


@pytest.mark.parametrize("how", [PLAIN, DUAL, SEQ, EVERYTHING])
def test_value_and_gradient_equal_a_plain_loop(how):
    batch = random_batch(3)
    extras, count = whole(batch, how)
    value, _, grad = loss_and_grad(
        batch["policy"], batch["old"], batch["advantages"], batch["mask"], count, how, extras
    )
    wanted_value, wanted_grad = plain_loop(batch, how, float(extras.entropy_threshold))
    assert value == pytest.approx(wanted_value, abs=1e-6)
    assert np.asarray(grad) == pytest.approx(wanted_grad, abs=1e-6)


@pytest.mark.parametrize("how", [PLAIN, EVERYTHING])
def test_gradients_equal_finite_differences(how):
    batch = random_batch(5, rows=2)
    extras, count = whole(batch, how)
    _, _, grad = loss_and_grad(batch["policy"], batch["old"], batch["advantages"], batch["mask"], count, how, extras)
    wide = {name: values.astype(np.float64) if values.dtype == np.float32 else values for name, values in batch.items()}
    threshold, step = float(extras.entropy_threshold), 1e-6
    for place in zip(*np.nonzero(batch["mask"]), strict=True):
        sides = []
        for sign in (1, -1):
            moved = wide | {"policy": wide["policy"].copy()}
            moved["policy"][place] += sign * step
            sides.append(plain_loop(moved, how, threshold)[0])
        assert grad[place] == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-6)


def test_the_entropy_term_has_the_gradient_of_its_coefficient():
    batch = random_batch(4)
    how = settings.Loss(entropy_coef=0.25)
    count = count_of(batch["mask"], how)

    def of_entropy(entropy):
        arrays = (batch["policy"], batch["old"], batch["advantages"], batch["mask"])
        return loss.policy_loss(*arrays, count, how, loss.Extras(entropy=entropy))[0]

    wanted = np.where(batch["mask"], -0.25 / batch["mask"].sum(), 0)
    assert np.asarray(jax.jit(jax.grad(of_entropy))(jnp.asarray(batch["entropy"]))) == pytest.approx(wanted, abs=1e-8)


@hypothesis_settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(8)), st.sampled_from([1, 4]), st.sampled_from([PLAIN, EVERYTHING]))
def test_micro_batches_add_up_to_the_global_batch(seed, order, rows, how):
    batch = random_batch(seed)
    extras, count = whole(batch, how)
    arrays = [batch[name] for name in ("policy", "old", "advantages", "mask")]
    value, statistics, grad = loss_and_grad(*arrays, count, how, extras)
    parts = [np.array(order[start : start + rows]) for start in range(0, 8, rows)]
    pieces = [loss_and_grad(*(a[part] for a in arrays), count, how, rows_of(extras, part)) for part in parts]
    assert sum(float(piece[0]) for piece in pieces) == pytest.approx(float(value), abs=1e-6)
    for name, total in statistics.items():
        assert sum(float(piece[1][name]) for piece in pieces) == pytest.approx(float(total), rel=1e-5, abs=1e-5)
    for part, piece in zip(parts, pieces, strict=True):
        assert np.asarray(piece[2]) == pytest.approx(np.asarray(grad)[part], abs=1e-7)


@hypothesis_settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([PLAIN, EVERYTHING]))
def test_padding_and_what_is_masked_move_nothing(seed, how):
    batch = random_batch(seed)
    extras, count = whole(batch, how)
    arrays = [batch[name] for name in ("policy", "old", "advantages", "mask")]
    value, _, grad = loss_and_grad(*arrays, count, how, extras)
    dirty = {name: np.pad(values, ((0, 1), (0, 3))) for name, values in batch.items()}
    junk = np.random.default_rng(seed).choice([np.nan, np.inf, -np.inf, 1e30, -60], dirty["mask"].shape)
    for name in ("policy", "old", "advantages", "entropy", "ref", "weights"):
        dirty[name] = np.where(dirty["mask"], dirty[name], junk).astype(np.float32)
    extras, dirty_count = whole(dirty, how)
    arrays = [dirty[name] for name in ("policy", "old", "advantages", "mask")]
    same, statistics, wide = loss_and_grad(*arrays, dirty_count, how, extras)
    assert dirty_count == count
    assert same == pytest.approx(float(value), abs=1e-6)
    assert np.asarray(wide)[:8, :6] == pytest.approx(np.asarray(grad), abs=1e-7)
    assert not np.asarray(wide)[~dirty["mask"]].any()
    assert all(np.isfinite(float(total)) for total in statistics.values())


def test_dropped_dead_groups_leave_the_loss_of_the_live_ones():
    live = random_batch(11, rows=2)
    dead = random_batch(12, rows=6)
    dead["mask"], dead["advantages"] = np.zeros_like(dead["mask"]), np.zeros_like(dead["advantages"])
    both = {name: np.concatenate([live[name], dead[name]]) for name in live}
    results = []
    for batch in (live, both):
        count = count_of(batch["mask"], PLAIN)
        results.append(loss_and_grad(*(batch[n] for n in ("policy", "old", "advantages", "mask")), count, PLAIN))
    assert results[0][0] == pytest.approx(float(results[1][0]), abs=1e-7)
    assert np.asarray(results[0][2]) == pytest.approx(np.asarray(results[1][2])[:2], abs=1e-8)
    assert results[1][1]["tokens"] == live["mask"].sum()


@pytest.mark.parametrize("shape", [(2, 1), (2, 4)])
def test_a_mesh_gives_the_numbers_of_one_device(shape):
    if jax.device_count() < shape[0] * shape[1]:
        pytest.skip(f"needs {shape[0] * shape[1]} devices")
    batch = random_batch(21)
    batch["mask"][:2] = False  # one shard without a trained token
    extras, count = whole(batch, EVERYTHING)
    arrays = tuple(batch[name] for name in ("policy", "old", "advantages", "mask"))
    value, _, grad = loss_and_grad(*arrays, count, EVERYTHING, extras)
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("data", "fsdp"))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    whole_mesh = NamedSharding(mesh, PartitionSpec())
    put = lambda leaf: jax.device_put(leaf, rows if np.ndim(leaf) == 2 else whole_mesh)  # noqa: E731
    arrays, count, extras = jax.tree.map(put, (arrays, count, extras))
    sharded, _, sharded_grad = loss_and_grad(*arrays, count, EVERYTHING, extras)
    assert sharded == pytest.approx(float(value), abs=1e-6)
    assert np.asarray(sharded_grad) == pytest.approx(np.asarray(grad), abs=1e-7)


def test_on_policy_the_clip_is_inert_and_the_gradient_is_the_advantage():
    batch = random_batch(8)
    count = count_of(batch["mask"], PLAIN)
    _, statistics, grad = loss_and_grad(
        batch["policy"], batch["policy"], batch["advantages"], batch["mask"], count, PLAIN
    )
    assert statistics["clip_low"] == statistics["clip_high"] == statistics["kl_old_sum"] == 0
    assert statistics["ratio_sum"] == statistics["tokens"]
    wanted = np.where(batch["mask"], -batch["advantages"], 0) / batch["mask"].sum()
    assert np.asarray(grad) == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("far", [-60.0, -1e30, -np.inf])
def test_an_absurd_log_ratio_gives_a_finite_loss_and_gradient(far, advantage):
    policy, old = np.array([[-1.0, -1.0]], np.float32), np.array([[far, -1.0]], np.float32)
    arrays = (np.full((1, 2), advantage, np.float32), np.ones((1, 2), bool), 2.0)
    value, statistics, grad = loss_and_grad(policy, old, *arrays, PLAIN)
    assert np.isfinite(value)
    assert np.isfinite(np.asarray(grad)).all()
    assert grad[0, 0] == 0
    assert all(np.isfinite(float(total)) for total in statistics.values())
    swapped, _, grad = loss_and_grad(old, policy, *arrays, PLAIN)
    assert np.isfinite(swapped)
    assert np.isfinite(np.asarray(grad)).all()


def test_correction_weights_scale_the_policy_term_and_carry_no_gradient():
    batch = random_batch(9)
    how = settings.Loss(correction="token")
    count = count_of(batch["mask"], how)
    arrays = tuple(batch[name] for name in ("policy", "old", "advantages", "mask"))
    extras = loss.Extras(weights=batch["weights"])
    value, statistics, grad = loss_and_grad(*arrays, count, how, extras)
    plain, _, plain_grad = loss_and_grad(*arrays, count, PLAIN)
    assert np.asarray(grad) == pytest.approx(batch["weights"] * np.asarray(plain_grad), abs=1e-7)
    assert statistics["weight_sum"] == pytest.approx(batch["weights"][batch["mask"]].sum(), rel=1e-6)
    of_weights = jax.grad(lambda w: loss.policy_loss(*arrays, count, how, loss.Extras(weights=w))[0])
    slope = jax.jit(of_weights)(jnp.asarray(batch["weights"]))
    assert not np.asarray(slope).any()
    assert value != plain


def test_reference_and_old_logprobs_carry_no_gradient():
    batch = random_batch(9)
    how = settings.Loss(kl_coef=0.1)

    def of_constants(old, ref):
        arrays = (batch["policy"], old, batch["advantages"], batch["mask"])
        return loss.policy_loss(*arrays, 7.0, how, loss.Extras(ref_logprobs=ref))[0]

    for slope in jax.jit(jax.grad(of_constants, (0, 1)))(jnp.asarray(batch["old"]), jnp.asarray(batch["ref"])):
        assert not np.asarray(slope).any()


@pytest.mark.parametrize("share", [0.2, 0.5, 0.99, 1.0])
def test_the_threshold_lets_the_top_share_of_all_tokens_pass(share):
    batch = random_batch(13)
    threshold = entropy_threshold(batch["entropy"], batch["mask"], share=share)
    trained = np.sort(batch["entropy"][batch["mask"]])[::-1]
    wanted = int(np.ceil(share * len(trained) - 1e-4))
    assert threshold == trained[wanted - 1]
    assert (trained >= float(threshold)).sum() == wanted


def test_high_entropy_selection_keeps_the_normaliser_of_all_tokens():
    batch = random_batch(13)
    how = settings.Loss(high_entropy_share=0.2)
    extras, count = whole(batch, how)
    arrays = tuple(batch[name] for name in ("policy", "old", "advantages", "mask"))
    value, statistics, grad = loss_and_grad(*arrays, count, how, extras)
    high = batch["mask"] & (batch["entropy"] >= float(extras.entropy_threshold))
    losses = np.asarray(loss.token_losses(np.exp(batch["policy"] - batch["old"]), batch["advantages"], how))
    assert count == batch["mask"].sum()
    assert statistics["high_entropy_tokens"] == high.sum() < batch["mask"].sum()
    assert value == pytest.approx(losses[high].sum() / batch["mask"].sum(), abs=1e-6)
    assert not np.asarray(grad)[~high].any()


@pytest.mark.parametrize("how", [PLAIN, SEQ])
def test_a_batch_without_trained_tokens_contributes_nothing(how):
    batch = random_batch(2)
    batch["mask"] = np.zeros_like(batch["mask"])
    extras, count = whole(batch, how)
    assert count == 1
    value, _, grad = loss_and_grad(*(batch[n] for n in ("policy", "old", "advantages", "mask")), count, how, extras)
    assert value == 0
    assert not np.asarray(grad).any()
