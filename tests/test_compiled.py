"""What is handed to XLA, and how it is called: read in the text of a step that is lowered or compiled."""

import dataclasses
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import pytest

from kimi_jax.compiled import STEP
from kimi_jax.layers.kda import KDA
from kimi_jax.layers.mla import MLA
from kimi_jax.layers.mlp import MLP
from kimi_jax.layers.moe import MoE
from kimi_jax.loading import random_model
from kimi_jax.measuring.timing import Decoding
from kimi_jax.planning.compile_check import compile_step
from kimi_jax.runtime import Model
from sharding_rules import SINGLE, helix
from tests.layouts import SMALL

BATCH, CAPACITY = 1, 96


def lowered(model: Model) -> str:
    """A decode step as XLA is given it."""
    tokens, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((BATCH, 1), (BATCH,)))
    params = jax.tree.map(model._extend._placed, model.abstract())
    with jax.set_mesh(model.mesh):
        return model._extend._jit.lower(params, tokens, counts, model.cache_structs(BATCH, CAPACITY)).as_text()


def test_layers_alike_are_traced_and_lowered_once(monkeypatch):
    """Of twelve layers with two kinds of attention and two of feed-forward, one each."""
    traced = []
    for kind in (KDA, MLA, MLP, MoE):
        plain = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda self, *args, f=plain: traced.append(type(self)) or f(self, *args))
    config = dataclasses.replace(SMALL, num_hidden_layers=12, mla_layers=(3, 7, 11))
    text = lowered(Model(config, SINGLE, "float32"))
    assert sorted(kind.__name__ for kind in traced) == ["KDA", "LowRankMLA", "MLP", "MoE"]
    assert text.count("func.func private @layer") == 4 and text.count("call @layer") == 24


def test_a_step_looks_into_the_stretch_of_the_embedding_that_a_rank_holds():
    """What XLA makes of a lookup in the whole table depends on the platform and on the number of tokens: for a single
    one it gathers all of it on GPUs.
    """
    text = lowered(Model(SMALL, helix(2, 4), "float32"))
    looks = re.findall(rf'"stablehlo\.gather"\(.*: \(tensor<(\d+)x{SMALL.hidden_size}x', text)
    assert str(SMALL.vocab_size // 8) in looks and str(SMALL.vocab_size) not in looks


def test_a_step_is_called_as_the_profiler_is_told():
    text = compile_step(Model(SMALL, SINGLE, "float32"), BATCH, CAPACITY).as_text()
    assert text.startswith(f"HloModule {STEP},")


def test_a_model_that_is_let_go_leaves_its_memory_at_once():
    """After it ran and was compiled to be timed: nothing may wait for the garbage collector."""
    model = random_model(SMALL, dtype="float32")
    model.logits([[1, 2, 3]])
    Decoding(model, BATCH, CAPACITY).compile()
    gone = weakref.ref(jax.tree.leaves(model.params)[0])
    enabled = gc.isenabled()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        if enabled:
            gc.enable()


def test_a_model_without_parameters_says_so():
    with pytest.raises(ValueError, match="the model has no parameters"):
        Model(SMALL, SINGLE, "float32").logits([[1]])
