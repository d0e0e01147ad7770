"""The lookup of the embedding, whole and where every rank holds a stretch of it."""

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
