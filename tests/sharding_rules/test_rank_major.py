"""Rank-major shards of the merged projection, and other transports of its gather: the same layer whichever is used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kimi_jax.layers.chunk import Chunk
from kimi_jax.layers.mla import LatentCache, LowRankMLA
from kimi_jax.ops.linear import project
from kimi_jax.planning.collectives import read
from sharding_rules import SINGLE, helix, logical_to_rank_major, rank_major_to_logical
from sharding_rules.axes import EMBED, QKV_A
from tests.layouts import SMALL

K3 = (1536, 512 + 64)  # q_lora, kv_lora + rope
PARTS = (SMALL.q_lora_rank, SMALL.kv_lora_rank + SMALL.qk_rope_head_dim)
WIDTH = sum(PARTS)


# ----------------------------------------------------------------------------------------------- the permutation
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_shards_of_unique_rows_gather_to_the_merged_matrix(ranks, array):
    logical = np.arange(2 * sum(K3), dtype=np.int32).reshape(sum(K3), 2)  # every number once
    q, kv = logical[: K3[0]], logical[K3[0] :]
    shards = [np.concatenate(pair) for pair in zip(np.split(q, ranks), np.split(kv, ranks), strict=True)]
    gathered = np.concatenate(shards)
    restored = rank_major_to_logical(array(gathered), K3, ranks, axis=0)
    assert isinstance(restored, type(array(gathered)))
    np.testing.assert_array_equal(restored, logical)
    np.testing.assert_array_equal(logical_to_rank_major(array(logical), K3, ranks, axis=0), gathered)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_any_axis_and_any_number_of_parts(axis):
    shape = [2, 3, 5]
    shape[axis] = 24
    x = np.arange(np.prod(shape)).reshape(shape)
    major = logical_to_rank_major(x, (4, 8, 12), 4, axis)
    assert major.shape == x.shape and (major != x).any()
    np.testing.assert_array_equal(rank_major_to_logical(major, (4, 8, 12), 4, axis), x)
    first = np.take(major, range(6), axis)  # rank 0: one of the first part, two of the second, three of the third
    np.testing.assert_array_equal(first, np.take(x, [0, 4, 5, 12, 13, 14], axis))


def test_without_the_restore_one_row_in_sixteen_is_in_place():
    rows = np.arange(sum(K3))
    assert (logical_to_rank_major(rows, K3, 16) == rows).sum() == 132 == sum(K3) // 16


@pytest.mark.parametrize("convert", [rank_major_to_logical, logical_to_rank_major])
def test_widths_that_do_not_divide_or_are_truncated_are_refused(convert):
    with pytest.raises(
        ValueError, match=r"parts=\(1536, 576\): 1536 does not divide by ranks=5; these do: 1, 2, 3, 4, 6"
    ):
        convert(np.zeros((2112, 2)), K3, 5, axis=0)
    with pytest.raises(ValueError, match="576 does not divide by ranks=512"):
        convert(np.zeros((2112, 2)), K3, 512, axis=0)
    with pytest.raises(ValueError, match=r"x has 2048 along axis 0, but parts=\(1536, 576\) sum to 2112: it is trunc"):
        convert(np.zeros((2048, 2)), K3, 16, axis=0)
    with pytest.raises(ValueError, match="ranks=0: at least 1"):
        convert(np.zeros((2112, 2)), K3, 0, axis=0)
    with pytest.raises(ValueError, match="axis=2: x has 2 axes"):
        convert(np.zeros((2112, 2)), K3, 16, axis=2)


# ----------------------------------------------------------------------------------------------- the whole layer
class ExplicitGather(LowRankMLA):
    """The same weight in the same place; each rank multiplies its rows and gathers by an explicit all-gather."""

    def _down(self, x, weight):
        axis = self.layout.mesh_axes(QKV_A)

        def here(x, weight):
            return jax.lax.all_gather(project(x, weight), axis, axis=-1, tiled=True)

        return self.layout.per_shard(here, [(), (QKV_A, EMBED)], ())(x, weight)


class RingGather(LowRankMLA):
    """The same, but every rank passes the piece that it got last on to the next: a ring of permutes."""

    def _down(self, x, weight):
        axis, ranks = self.layout.mesh_axes(QKV_A), self.layout.shards(QKV_A)
        ring = [(i, (i + 1) % ranks) for i in range(ranks)]

        def here(x, weight):
            piece, rank = project(x, weight), jax.lax.axis_index(axis)
            pieces = jnp.zeros((ranks, *piece.shape), piece.dtype)
            for step in range(ranks):
                pieces = pieces.at[(rank - step) % ranks].set(piece)
                piece = jax.lax.ppermute(piece, axis, ring)
            return jnp.moveaxis(pieces, 0, -2).reshape(*piece.shape[:-1], -1)

        return self.layout.per_shard(here, [(), (QKV_A, EMBED)], ())(x, weight)


class RankMajor(LowRankMLA):
    """The weight as GPU engines store it: each rank holds [q_r | kv_r]; the gathered output is put back in order."""

    def _down(self, x, weight):
        axis, ranks = self.layout.mesh_axes(QKV_A), self.layout.shards(QKV_A)

        def here(x, weight):
            gathered = jax.lax.all_gather(project(x, weight), axis, axis=-1, tiled=True)
            return rank_major_to_logical(gathered, PARTS, ranks)

        return self.layout.per_shard(here, [(), (QKV_A, EMBED)], ())(x, weight)


class NoRestore(RankMajor):
    """RankMajor that forgets to restore: every shape is right."""

    def _down(self, x, weight):
        return ExplicitGather._down(self, x, weight)


LAYOUTS = [helix(2, 4, shard_qkv_a=True), helix(1, 2, shard_qkv_a=True), helix(4, 1, shard_qkv_a=True)]


@functools.cache
def weights(integers: bool):
    """The parameters of one MLA layer and its input, as numpy arrays."""
    rng = np.random.default_rng(0)
    _, state = nnx.split(LowRankMLA(SMALL, SINGLE, jnp.float32))
    shapes = jax.tree.map(lambda v: v.get_value().shape, state, is_leaf=lambda x: isinstance(x, nnx.Variable))

    def draw(shape):
        if integers:
            return rng.integers(-3, 4, shape).astype(np.float32)
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    x = draw((2, 7, SMALL.hidden_size))
    return jax.tree.map(draw, nnx.to_pure_dict(shapes), is_leaf=lambda s: isinstance(s, tuple)), x


@functools.cache
def run(layer: type, layout, *, integers: bool = False, text: bool = False):
    """The layer's output for a prompt of seven tokens, and its latents; or the compiled text."""
    params, x = weights(integers)
    if issubclass(layer, RankMajor):
        params = params | {"qkv_a": logical_to_rank_major(params["qkv_a"], PARTS, layout.ranks, axis=0)}
    graph, state = nnx.split(layer(SMALL, layout, jnp.float32))
    axes = nnx.to_pure_dict(
        jax.tree.map(lambda v: v.get_metadata("axes"), state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    )
    mesh = layout.mesh()
    params = {name: jax.device_put(value, layout.sharding(mesh, *axes[name])) for name, value in params.items()}
    rows = LatentCache.shape(SMALL, layout, 2, 64, jnp.float32).rows
    cache = LatentCache(jnp.zeros(rows.shape, rows.dtype))
    chunk = Chunk(jnp.zeros(2, jnp.int32), jnp.array([7, 4], jnp.int32))

    def step(params, x):
        module = nnx.merge(graph, params)
        with jax.default_matmul_precision("highest"):
            return module(x, cache, chunk)[0], module._down(x, module.qkv_a[...])

    with jax.set_mesh(mesh):
        if text:
            return jax.jit(step).lower(params, x).compile().as_text()
        return jax.tree.map(np.asarray, jax.jit(step)(params, x))


@pytest.mark.parametrize("layer", [LowRankMLA, ExplicitGather, RingGather, RankMajor])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.tp}x{layout.cp}")
def test_every_transport_and_either_order_give_the_replicated_layer(layer, layout):
    wanted, wanted_down = run(LowRankMLA, SINGLE)
    found, down = run(layer, layout)
    assert down.shape == (2, 7, WIDTH)
    assert np.abs(down - wanted_down).max() <= 1e-6 * np.abs(wanted_down).max()
    assert np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("layer", [LowRankMLA, ExplicitGather, RingGather, RankMajor])
def test_integer_data_is_equal_bit_for_bit(layer):
    _, wanted = run(LowRankMLA, SINGLE, integers=True)
    _, found = run(layer, LAYOUTS[0], integers=True)
    assert np.array_equal(found, wanted) and len(np.unique(wanted)) > 100


def test_a_forgotten_restore_is_seen():
    wanted, _ = run(LowRankMLA, SINGLE)
    found, _ = run(NoRestore, LAYOUTS[0])
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() > 0.1 * np.abs(wanted).max()


def test_transports_differ_in_the_compiled_step_alone():
    kinds = {layer: {f.kind for f in read(run(layer, LAYOUTS[0], text=True))} for layer in (ExplicitGather, RingGather)}
    assert "all-gather" in kinds[ExplicitGather] and "collective-permute" not in kinds[ExplicitGather]
    assert "collective-permute" in kinds[RingGather] and "all-gather" not in kinds[RingGather]
