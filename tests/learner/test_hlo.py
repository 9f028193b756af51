"""Reading a compiled module: collectives by kind, inside loops, and the arrays that it names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rstar2_jax.learner import hlo
from rstar2_jax.model import sharding

MESH = sharding.make_mesh((8, 1, 1))


def compiled(function, shape=(8, 64)):
    where = NamedSharding(MESH, PartitionSpec("data"))
    return jax.jit(function).lower(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)).compile().as_text()


def test_a_sum_over_devices_is_one_all_reduce_of_its_result():
    (found,) = hlo.collectives(compiled(lambda x: x.sum(axis=0)))
    assert found == hlo.Collective(kind="all-reduce", size=4 * 64, times=1, groups=(tuple(range(8)),))
    assert found.sent == 2 * 4 * 64 * 7 / 8


def module(kind, written):
    """The text of a module of eight devices with one collective."""
    return "\n".join(
        [
            "HloModule m, num_partitions=8",
            "ENTRY %main (a: f32[8]) -> f32[4] {",
            f"  ROOT %x = f32[4]{{0}} {kind}(f32[8]{{0}} %a), channel_id=1, {written}, dimensions={{0}}",
            "}",
        ]  # fmt: skip
    )


HALVES, PAIRS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1), (2, 3), (4, 5), (6, 7))
STRIDES = ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize(
    "written, groups",
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", HALVES),
        ("replica_groups={}", (tuple(range(8)),)),
        ("replica_groups=[2,4]<=[8]", HALVES),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", STRIDES),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", HALVES),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", PAIRS),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", STRIDES),
        ("replica_groups=mesh['a'=8,'b'=1], device_ids=([2,4]T(1,0)) {'a':(4)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,2,1,3,4,6,5,7) {'b'}", STRIDES),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
    ],
)
def test_who_exchanges_with_whom_is_read_however_it_is_written(written, groups):
    kind = "collective-permute" if "pairs" in written else "reduce-scatter"
    (found,) = hlo.collectives(module(kind, written))
    assert found.groups == groups and found.size == 16
    assert found.sent == (16 if "pairs" in written else 16 * (len(groups[0]) - 1))


def test_an_unknown_notation_of_groups_is_an_error():
    with pytest.raises(ValueError, match="unknown notation: .*replica_groups=<all>"):
        hlo.collectives(module("all-reduce", "replica_groups=<all>"))


@pytest.mark.parametrize("axes, apart", [("data", 4), ("fsdp", 2), ("tensor", 1), (("data", "tensor"), None)])
def test_the_groups_of_a_compiled_program_lie_along_the_axes_of_its_mesh(axes, apart):
    mesh = sharding.make_mesh((2, 2, 2))
    where = NamedSharding(mesh, PartitionSpec(axes))
    whole = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec())) * 2)
    text = whole.lower(jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=where)).compile().as_text()
    (found,) = hlo.collectives(text)
    assert found.kind == "all-gather"
    if apart is None:
        assert sorted(map(sorted, found.groups)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    else:
        assert {second - first for first, second in found.groups} == {apart} and len(found.groups) == 4


def test_a_collective_in_a_loop_counts_as_often_as_the_loop_runs():
    def body(x, _):
        return x + jax.lax.with_sharding_constraint(x.sum(axis=0), NamedSharding(MESH, PartitionSpec())), None

    found = hlo.collectives(compiled(lambda x: jax.lax.scan(body, x, None, length=7)[0]))
    assert sum(one.times for one in found if one.kind == "all-reduce") == 7


def test_a_program_of_one_device_communicates_nothing():
    assert hlo.collectives(jax.jit(jnp.sin).lower(jnp.ones(3)).compile().as_text()) == []


def test_arrays_are_named_with_type_and_shape():
    text = compiled(lambda x: (x @ jnp.ones((64, 5))).astype(jnp.bfloat16))
    assert ("f32", (1, 64)) in hlo.array_sizes(text) and ("bf16", (1, 5)) in hlo.array_sizes(text)
    assert hlo.byte_size("bf16", (1, 5)) == 10


def test_text_that_is_no_module_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.collectives("nothing")
