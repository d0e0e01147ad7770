"""The guards: each size that a layout does not divide is named, with the meshes that would do, before any array."""

import dataclasses
import re

import jax
import pytest

import kimi_jax
from kimi_jax.config import KIMI_K3, KIMI_LINEAR_48B
from kimi_jax.model import guard, sizes
from kimi_jax.planning.plan import plan
from kimi_jax.runtime import Model
from sharding_rules import SINGLE, Size, axes, check, helix, misfits, valid_meshes
from tests.layouts import SMALL, SMALL_K3

SIZES = [Size("heads", axes.KDA_HEADS, 12), Size("experts", axes.EXPERTS, 20)]


def test_what_does_not_divide_is_found():
    assert misfits(helix(2, 2), SIZES) == []
    assert misfits(helix(1, 3), SIZES) == [SIZES[1]]
    assert misfits(helix(1, 8), SIZES) == SIZES
    assert misfits(helix(1, 8).replace(kda_heads="tp"), SIZES) == [SIZES[1]]


def test_valid_meshes_are_all_factorings_that_divide():
    assert valid_meshes(SINGLE, SIZES, 4) == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    every = valid_meshes(SINGLE, SIZES, 100)
    assert {tp * cp for tp, cp in every} == {1, 2, 4}
    loose = SINGLE.replace(experts="tp", hidden="tp")
    assert (1, 12) in valid_meshes(loose, SIZES, 100) and (4, 3) in valid_meshes(loose, SIZES, 100)


def test_the_message_names_sizes_shards_and_the_meshes_that_do():
    with pytest.raises(ValueError) as error:
        check(helix(1, 8), SIZES, devices=4, hints=["or go home"])
    assert str(error.value) == (
        "tp=1 x cp=8 does not fit: heads (12) do not divide by the 8 shards of 'kda_heads'; experts (20) do not divide "
        "by the 8 shards of 'experts'. tp * cp in {1, 2, 4} is valid up to 32 ranks; (tp, cp) on 4 devices: (1, 1), "
        "(1, 2), (1, 4), (2, 1), (2, 2), (4, 1). or go home"
    )


def test_kimi_k3_takes_exactly_these_ranks():
    """96 heads of each kind and 896 experts: the common divisors, whichever way they are factored."""
    every = valid_meshes(SINGLE, sizes(KIMI_K3, SINGLE), 128)
    assert {tp * cp for tp, cp in every} == {1, 2, 4, 8, 16, 32}
    assert len(every) == 1 + 2 + 3 + 4 + 5 + 6
    for ranks in range(1, 65):
        if ranks in (1, 2, 4, 8, 16, 32):
            guard(KIMI_K3, helix(1, ranks, shard_qkv_a=True))
        else:
            with pytest.raises(ValueError, match=re.escape("tp * cp in {1, 2, 4, 8, 16, 32} is valid up to")):
                guard(KIMI_K3, helix(ranks, 1))


BROKEN = {
    "num_attention_heads": "MLA heads",
    "kda_num_heads": "KDA heads",
    "num_experts": "experts",
    "intermediate_size": "hidden of the dense MLP",
    "moe_intermediate_size": "hidden of the shared experts",
    "vocab_size": "vocabulary",
    "q_lora_rank": "rows of q_a, q_lora",
    "kv_lora_rank": "rows of kv_a, kv_lora + rope",
}


@pytest.mark.parametrize("field", BROKEN)
def test_each_size_is_guarded_by_name(field):
    """A model that eight ranks divide but for one size, which nine or four would do."""
    changes = {field: getattr(SMALL, field) // 8 * 8 + 4}
    broken = dataclasses.replace(SMALL, **changes, **({"num_shared_experts": 1} if "moe_int" in field else {}))
    with pytest.raises(ValueError, match=rf"{re.escape(BROKEN[field])} \(\d+\) do not divide by the 8 shards") as error:
        guard(broken, helix(1, 8, shard_qkv_a=True), devices=8)
    assert "(1, 4), (2, 1), (2, 2), (4, 1)" in str(error.value) and "(8, 1)" not in str(error.value)
    guard(broken, helix(2, 2, shard_qkv_a=True))


def test_every_entry_guards_before_it_makes_an_array(tiny, monkeypatch):
    layout = helix(1, 3)
    monkeypatch.setattr(jax, "jit", None)
    for call in (
        lambda: plan(SMALL, layout),
        lambda: Model(SMALL, layout, "float32"),
        lambda: kimi_jax.random_model(SMALL, layout=layout),
        lambda: kimi_jax.load(tiny, layout=layout, progress=False),
    ):
        with pytest.raises(ValueError, match="tp=1 x cp=3 does not fit: MLA heads"):
            call()


def test_more_devices_than_there_are_is_an_error_before_any_array():
    with pytest.raises(ValueError, match="tp=2 x cp=8 needs 16 devices, but there are 8"):
        kimi_jax.random_model(SMALL, layout=helix(2, 8))


def test_edited_rules_are_guarded_by_what_they_split():
    """KDA heads over cp alone: tp may now be what 32 heads do not divide by."""
    layout = helix(3, 4).replace(
        kda_heads="cp", hidden=None, experts=None, vocab=None, heads=None, heads_merged="cp", qkv_a=None
    )
    guard(SMALL, layout)
    with pytest.raises(ValueError, match=r"vocabulary \(272\) do not divide by the 3 shards of 'vocab'"):
        guard(SMALL, layout.replace(vocab="tp"))


def test_the_latent_moe_is_guarded_where_a_rule_splits_it():
    odd = dataclasses.replace(SMALL_K3, routed_expert_hidden_size=100, packed_experts=False)
    guard(odd, helix(2, 4))
    with pytest.raises(
        ValueError, match=r"width of the latent MoE \(100\) do not divide by the 8 shards of 'latent_moe'"
    ):
        guard(odd, helix(2, 4).replace(latent_moe=("tp", "cp")))


def test_heads_that_do_not_divide_may_be_padded():
    odd = dataclasses.replace(SMALL, num_attention_heads=18)
    with pytest.raises(ValueError, match=r"MLA heads can be padded: helix\(\.\.\., pad_heads=True\)"):
        guard(odd, helix(2, 4))
    guard(odd, helix(2, 4, pad_heads=True))


def test_shard_qkv_a_needs_a_merged_projection():
    with pytest.raises(ValueError, match="this model has no q-LoRA, so there is no merged"):
        guard(KIMI_LINEAR_48B, helix(1, 8, shard_qkv_a=True))
    guard(KIMI_LINEAR_48B, helix(1, 1, shard_qkv_a=True))
