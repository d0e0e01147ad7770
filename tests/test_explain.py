"""Where weights live: the golden placement tables, what stays replicated, and what changes between two layouts.

To write the golden files anew after a wanted change: `python -m tests.test_explain`.
"""

import json
from pathlib import Path

import jax
import pytest

from kimi_jax.config import KIMI_K3, KIMI_LINEAR_48B, Config
from kimi_jax.placement import describe
from kimi_jax.planning.explain import explain, explain_diff
from kimi_jax.planning.plan import plan
from kimi_jax.runtime import Model
from sharding_rules import SINGLE, helix
from tests.layouts import SMALL, SMALL_K3

GOLDEN = Path(__file__).parent / "golden"
TINY = Config.from_hf(Path(__file__).parents[1] / "kimi_jax" / "assets" / "kimi-linear-tiny")
PLACEMENTS = {
    "placement-tiny-2x4": (TINY, helix(2, 4)),
    "placement-tiny-2x4-shard_qkv_a": (TINY, helix(2, 4, shard_qkv_a=True)),
    "placement-48b-2x4": (KIMI_LINEAR_48B, helix(2, 4)),
    "placement-k3-1x16-shard_qkv_a": (KIMI_K3, helix(1, 16, shard_qkv_a=True)),
}


def golden() -> dict[Path, str]:
    """Each golden file and what it should hold."""
    return {GOLDEN / f"{name}.txt": explain(*what).table() + "\n" for name, what in PLACEMENTS.items()}


@pytest.mark.parametrize("file", list(golden()), ids=lambda file: file.stem)
def test_placements_are_the_golden_ones(file):
    assert golden()[file] == file.read_text()


@pytest.mark.parametrize("config", [SMALL, SMALL_K3], ids=["kimi-linear", "kimi-k3"])
def test_every_parameter_is_on_one_line_with_the_bytes_that_a_device_holds(config):
    layout = helix(2, 4, shard_qkv_a=True)
    said = explain(config, layout)
    model = Model(config, layout, "bfloat16")
    leaves = zip(jax.tree.leaves(model.abstract()), jax.tree.leaves(model.shardings()), strict=True)
    held = [at.shard_shape(x.shape) for x, at in leaves]
    assert sum(weight.times for weight in said.weights) == len(held)
    assert sorted(held) == sorted(weight.shard for weight in said.weights for _ in range(weight.times))
    assert said.nbytes == plan(config, layout).weights == sum(weight.nbytes for weight in said.weights)
    assert len({weight.name for weight in said.weights}) == len(said.weights)


def test_a_weight_says_its_axes_its_rule_and_its_shard():
    said = explain(KIMI_K3, helix(2, 8, shard_qkv_a=True))
    weight = said["kda.qkv"]
    assert weight.axes == ("kda_heads", None, None, "embed") and weight.times == 69
    assert weight.rules == (("kda_heads", ("tp", "cp")),) and weight.placement == "kda_heads: tp, cp"
    assert (weight.shape, weight.shard) == ((96, 3, 128, 7168), (6, 3, 128, 7168))
    assert weight.nbytes == 69 * 6 * 3 * 128 * 7168 * 2 and not weight.replicated
    assert said["mla.q_b"].placement == "heads: tp" and said["mla.o"].placement == "heads_merged: tp, cp"
    assert said["kda.A_log"].dtype == "float32" and said["moe.experts_down_packed"].dtype == "uint8"
    with pytest.raises(KeyError, match=r"'kda\.q' is not one of embed, "):
        said["kda.q"]


def test_what_stays_replicated_comes_largest_first():
    said = explain(KIMI_K3, helix(1, 16))
    sizes = [weight.nbytes for weight in said.replicated]
    assert sizes == sorted(sizes, reverse=True)
    names = [weight.name for weight in said.replicated]
    # One cp group holds all the MLA heads; they are split over tp, of which there is one rank.
    assert names[:2] == ["moe.latent_down", "moe.latent_up"] and "mla.qkv_a" in names and "mla.q_b" in names
    assert all(weight.shape == weight.shard for weight in said.replicated)
    assert len(explain(KIMI_K3, SINGLE).replicated) == len(explain(KIMI_K3, SINGLE).weights)


def test_a_diff_says_what_moves_what_it_gains_and_which_collectives_change():
    off, on = explain(KIMI_K3, helix(1, 16)), explain(KIMI_K3, helix(1, 16, shard_qkv_a=True))
    diff = explain_diff(off, on)
    assert [(a.name, b.shard) for a, b in diff.moved] == [("mla.qkv_a", (132, 7168))]
    assert diff.gained == -681_246_720
    assert [(c.part, c.times, c.kind, c.payload) for c in diff.added] == [("mla", 24, "all-gather", 4224)]
    assert diff.dropped == ()
    back = explain_diff(on, off)
    assert (back.gained, back.added, back.dropped) == (681_246_720, (), diff.added)
    same = explain_diff(on, on)
    assert (same.moved, same.gained, same.added, same.dropped) == ((), 0, (), ())
    assert "no weight moves" in same.table() and "no collective changes" in same.table()


def test_a_diff_between_meshes_names_the_heads_and_the_exchange():
    diff = explain_diff(explain(TINY, helix(2, 4)), explain(TINY, helix(1, 8)))
    assert [a.name for a, _ in diff.moved] == ["mla.q_b", "mla.k_b", "mla.v_b"]
    assert [(c.kind, c.ranks) for c in diff.added] == [("all-to-all", 8)]
    assert [(c.kind, c.ranks) for c in diff.dropped] == [("all-to-all", 4)]


def test_an_edited_rule_is_named():
    edited = helix(2, 4, pad_heads=True).replace(vocab="cp", latent_moe=("tp", "cp"), kda_heads=None)
    assert describe(edited) == "tp=2 x cp=4 = 8 ranks, pad_heads; vocab: cp; kda_heads: replicated; latent_moe: tp, cp"
    assert describe(SINGLE) == "tp=1 x cp=1 = 1 rank"
    diff = explain_diff(explain(SMALL_K3, helix(2, 4)), explain(SMALL_K3, helix(2, 4).replace(latent_moe=("tp", "cp"))))
    assert {a.name for a, _ in diff.moved} == {"moe.latent_down", "moe.latent_up"}
    assert [(c.kind, c.over) for c in diff.added] == [("all-gather", "latent_moe"), ("all-reduce", "latent_moe")]


def test_only_one_model_can_be_compared_with_itself():
    with pytest.raises(ValueError, match="different models or dtypes"):
        explain_diff(explain(SMALL, SINGLE), explain(SMALL_K3, SINGLE))
    with pytest.raises(ValueError, match="different models or dtypes"):
        explain_diff(explain(SMALL, SINGLE), explain(SMALL, SINGLE, dtype="float32"))


def test_explanations_print_as_text_html_and_json():
    layout, other = helix(2, 4), helix(2, 4, shard_qkv_a=True)
    said = explain(TINY, layout)
    assert repr(said) == said.table()
    assert said._repr_html_().count("<table>") == 2
    values = json.loads(json.dumps(said.to_json()))
    assert values["bytes"] == said.nbytes and len(values["weights"]) == len(said.weights)
    assert values["replicated"][0] == "mla.qkv_a"
    diff = explain_diff(said, explain(TINY, other))
    assert "from tp=2 x cp=4 = 8 ranks to tp=2 x cp=4 = 8 ranks, shard_qkv_a: -78,848 bytes a device" in repr(diff)
    values = json.loads(json.dumps(diff.to_json()))
    assert values["gained"] == -78_848 and values["moved"][0]["after"]["shard"] == [22, 128]
    assert diff._repr_html_().count("<table>") == 2


def test_a_layout_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="tp=1 x cp=3 does not fit"):
        explain(TINY, helix(1, 3))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for path, text in golden().items():
        path.write_text(text)
