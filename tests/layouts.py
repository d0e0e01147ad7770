"""One small model on any layout, for the tests that compare layouts: sizes, weights, prompts, and what comes out.

The weights are drawn once, on one device, and then spread: compiling is what these tests cost, so all of them use the
same shapes, and a layout's model is made once a session.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np

from kimi_jax.config import Config
from kimi_jax.generation.generate import feed, generate
from kimi_jax.loading import random_model
from kimi_jax.runtime import Model
from sharding_rules import Layout, helix
from tests.checkpoints import making

# KDA with a dense MLP, then MLA with a MoE. Sixteen ranks divide all; no two axes of one array are of one size.
SMALL = Config(**making.SMALL | dict(
    vocab_size=272, hidden_size=72, num_hidden_layers=2, mla_layers=(1,), num_attention_heads=16, q_lora_rank=64,
    kv_lora_rank=40, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20, kda_num_heads=32, kda_head_dim=10,
    intermediate_size=112, num_experts=48, num_experts_per_token=3, moe_intermediate_size=40, num_shared_experts=2,
    eos_token_ids=(),
))  # fmt: skip
SMALL_K3 = dataclasses.replace(SMALL, **making.K3 | dict(routed_expert_hidden_size=96))

BATCH, CAPACITY, LENGTH = 4, 64, 16  # LENGTH: of the one prefill chunk that the prompts take
PROMPTS = [[5], [3, 1, 4, 1, 5], list(range(16)), list(range(100, 111))]
NEW_TOKENS = 16

PARITY = 1e-5  # of the largest logit: two orders of summation in float32


class Outcome(NamedTuple):
    """What a model makes of PROMPTS: logits after the prompts, then greedy tokens and their log probabilities."""

    logits: np.ndarray
    tokens: list[list[int]]
    logprobs: np.ndarray


@functools.cache
def one_device(config: Config = SMALL) -> Model:
    """Random float32 weights on one device."""
    return random_model(config, dtype="float32")


@functools.cache
def spread(layout: Layout, config: Config = SMALL) -> Model:
    """The weights of `one_device` on a layout."""
    model = Model(config, layout, "float32")
    model.params = jax.device_put(one_device(config).params, model.shardings())
    return model


def outcome(model: Model) -> Outcome:
    """Prefill and decode, through the public steps."""
    logits, _ = feed(model, PROMPTS, model.new_state(BATCH, CAPACITY))
    rows = generate(model, PROMPTS, max_new_tokens=NEW_TOKENS, capacity=CAPACITY, logprobs=True)
    return Outcome(np.asarray(logits), [r.tokens for r in rows], np.array([r.logprobs for r in rows]))


@functools.cache
def wanted(config: Config = SMALL) -> Outcome:
    """The outcome on one device."""
    return outcome(one_device(config))


def check_parity(found: Outcome, config: Config = SMALL) -> None:
    """Fail unless an outcome is that of one device: logits and log probabilities within PARITY, tokens equal."""
    one = wanted(config)
    scale = np.abs(one.logits).max()
    assert np.isfinite(found.logits).all()
    assert np.abs(found.logits - one.logits).max() <= PARITY * scale
    assert found.tokens == one.tokens
    assert np.abs(found.logprobs - one.logprobs).max() <= PARITY * scale


def factorings(ranks: int) -> list[tuple[int, int]]:
    """Every (tp, cp) of so many ranks."""
    return [(tp, ranks // tp) for tp in range(1, ranks + 1) if ranks % tp == 0]


def name(layout: Layout) -> str:
    """For test ids: "2x4", "2x4-qkv_a"."""
    return f"{layout.tp}x{layout.cp}" + ("-qkv_a" if layout.mesh_axes("qkv_a") else "")


def layouts(*ranks: int, switches: tuple[bool, ...] = (False, True)) -> list[Layout]:
    """Every mesh of these ranks, with the merged projection replicated and split."""
    return [
        helix(tp, cp, shard_qkv_a=on, tokens_per_block=4)
        for count in ranks
        for tp, cp in factorings(count)
        for on in switches
    ]
