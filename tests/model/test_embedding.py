"""The embedding split over devices: the numbers of one device, and no gradient of the whole table on any of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rstar2_jax import hardware
from rstar2_jax.learner import hlo
from rstar2_jax.model import embedding, sharding

ROWS, TOKENS, WIDTH, VOCAB = 8, 24, 16, 64
LAYOUTS = [
    ((8, 1, 1), hardware.Sharding()),
    ((1, 4, 2), hardware.Sharding(sequence=("tensor",))),
    ((2, 2, 2), hardware.Sharding(embed=())),
    ((2, 2, 2), hardware.Sharding(rows=("fsdp",), embed=("data", "fsdp"), sequence=("tensor",))),
    ((2, 2, 2), hardware.Sharding(rows=("data",), embed=("data", "fsdp"))),
    ((1, 1, 8), hardware.Sharding(sequence=("tensor",), vocab=())),
]


def made(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (ROWS, TOKENS)) // 2 * 2, jnp.int32)  # half of the ids, and often
    return table, tokens, jnp.asarray(rng.normal(size=(ROWS, TOKENS, WIDTH)), dtype)


def states_and_gradient(dtype, layout):
    table, tokens, pull = made(dtype)

    def run(table):
        states = embedding.lookup(table, tokens, dtype, layout)
        return jnp.sum((states * pull).astype(jnp.float32)), states

    (_, states), gradient = jax.jit(jax.value_and_grad(run, has_aux=True))(table)
    return states, gradient


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mesh, table", LAYOUTS)
def test_split_over_devices_the_states_are_those_of_one_and_so_is_the_gradient(mesh, table, dtype):
    states, gradient = states_and_gradient(dtype, sharding.Layout(sharding.make_mesh(mesh), table))
    alone, wanted = states_and_gradient(dtype, None)
    np.testing.assert_array_equal(states, alone)
    assert states.dtype == dtype and gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, wanted, atol=1e-6 if dtype == jnp.float32 else 1e-5)
    assert not np.any(gradient[1::2]) and np.abs(gradient).max() > 1


def test_the_gradient_is_reduced_once_and_never_whole_on_a_device():
    layout = sharding.Layout(sharding.make_mesh((1, 4, 2)), hardware.Sharding(sequence=("tensor",)))
    table, tokens, pull = made()
    where = [jax.sharding.NamedSharding(layout.mesh, layout.spec(*axes)) for axes in (("vocab", "embed"), ("rows",))]

    def gradient(table, tokens, pull):
        return jax.grad(lambda table: jnp.sum(embedding.lookup(table, tokens, jnp.float32, layout) * pull))(table)

    step = jax.jit(gradient, in_shardings=(where[0], where[1], where[1]), out_shardings=where[0])
    text = step.lower(table, tokens, pull).compile().as_text()
    assert ("f32", (VOCAB // 2, WIDTH)) in hlo.array_sizes(text)
    assert ("f32", (VOCAB, WIDTH)) not in hlo.array_sizes(text)
    share = 4 * VOCAB // 2 * WIDTH // 4
    reduced = [one for one in hlo.collectives(text) if one.kind in ("all-reduce", "reduce-scatter")]
    assert [(one.kind, one.size) for one in reduced] == [("reduce-scatter", share)]
