"""The lookup of the embedding: on one rank and on several, and that it stays within what a rank holds."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.embedding import embed
from sharding_rules import helix
from sharding_rules.axes import BATCH, EMBED, LENGTH, VOCAB

W, D = 272, 24
SPLIT, AT = helix(2, 4), (BATCH, LENGTH)
WHOLE = SPLIT.replace(vocab=None)


def looked_up(layout):
    axis = layout.mesh_axes(VOCAB)
    return layout.per_shard(partial(embed, axis=axis), [(VOCAB, EMBED), AT, AT], (*AT, EMBED))


@pytest.mark.parametrize("layout", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_gives_its_row_a_dead_one_zeros_and_one_beyond_the_nearest(layout, dtype):
    table = np.random.default_rng(0).normal(size=(W, D)).astype(jnp.dtype(dtype))
    table[7] = np.nan  # nobody's row may reach another token
    tokens = np.array([[0, 33, 34, W - 1], [200, 5, W, -3]], np.int32)
    live = np.array([[True, True, True, True], [True, False, True, True]])
    want = np.where(live[..., None], table[np.clip(tokens, 0, W - 1)], 0)
    with jax.set_mesh(layout.mesh()):
        found = jax.jit(looked_up(layout))(table, tokens, live)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("batch", [1, 4])
def test_only_the_stretch_that_a_rank_holds_is_looked_into(batch):
    """What XLA makes of a lookup in the whole table depends on the platform and on the number of tokens."""
    shapes = [((W, D), jnp.float32), ((batch, 1), jnp.int32), ((batch, 1), jnp.bool_)]
    with jax.set_mesh(SPLIT.mesh()):
        text = jax.jit(looked_up(SPLIT)).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).as_text()
    looks = re.findall(r'"stablehlo\.gather"\(.*: \(tensor<(\d+)x', text)
    assert looks == [str(W // 8)]
