"""The collective budget: compiled steps contain what the formula says and nothing else; and the reader of HLO text."""

import functools
import math
import re

import jax
import pytest

from kimi_jax.config import KIMI_K3, Config
from kimi_jax.layers import mla
from kimi_jax.planning.collectives import Collective, Found, differences, needed, part_of, read
from kimi_jax.planning.compile_check import compile_step
from kimi_jax.runtime import Model
from sharding_rules import SINGLE, Layout, axes, helix
from tests.layouts import BATCH, CAPACITY, LENGTH, SMALL, SMALL_K3, name

D, W, R, Q_R_P, V, HEADS, Z = 72, 272, 40, 64 + 48, 20, 16, 96
BOTH = helix(2, 4, tokens_per_block=4)
SPLIT = helix(2, 4, shard_qkv_a=True, tokens_per_block=4)


@functools.cache
def compiled(layout: Layout, length: int, config: Config = SMALL, batch: int = BATCH) -> list[Found]:
    """The collectives of a step, as compiled."""
    return read(compile_step(Model(config, layout, "float32"), batch, CAPACITY, length).as_text())


def budget(layout: Layout, length: int, config: Config = SMALL, batch: int = BATCH) -> list[str]:
    """Where a compiled step is not what the formula says."""
    wanted = needed(config, layout, "float32", one_token=length == 1)
    return differences(compiled(layout, length, config, batch), wanted, config, batch, length)


@pytest.mark.parametrize("length", [1, LENGTH], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    "layout", [BOTH, SPLIT, helix(8, 1, shard_qkv_a=True), helix(1, 8, tokens_per_block=4), SINGLE], ids=name
)
def test_a_step_has_the_collectives_of_the_formula_and_no_other(layout, length):
    assert budget(layout, length) == []


@pytest.mark.parametrize(("layout", "config"), [(BOTH, SMALL), (SPLIT, SMALL_K3)], ids=["kimi-linear", "kimi-k3"])
def test_a_step_of_a_single_token_has_them_too(layout, config):
    """XLA turns a lookup of one token into a slice, and would gather the whole embedding in front of it."""
    assert budget(layout, 1, config, batch=1) == []


@pytest.mark.parametrize("length", [1, LENGTH], ids=["decode", "prefill"])
def test_each_layer_has_the_collectives_of_the_design(length):
    """Written out by hand, so that formula and model cannot be wrong together."""
    found = [(part_of(f.scope, SMALL), f.kind, f.ranks, f.values) for f in compiled(BOTH, length)]
    tokens, width = BATCH * length, R if length == 1 else V
    assert sorted(found) == sorted(
        [
            ("embedding", "all-reduce", 8, tokens * D),
            ("kda", "all-reduce", 8, tokens * D),
            ("dense", "all-reduce", 8, tokens * D),
            ("mla", "all-to-all", 4, tokens * HEADS // 2 * (width + 1)),
            ("mla", "all-reduce", 8, tokens * D),
            ("moe", "all-reduce", 8, tokens * D),
            ("head", "all-gather", 8, BATCH * W),
        ]
    )


@pytest.mark.parametrize("length", [1, LENGTH], ids=["decode", "prefill"])
def test_shard_qkv_a_adds_one_gather_of_the_activation_and_nothing_else(length):
    off, on = list(compiled(BOTH, length)), list(compiled(SPLIT, length))
    key = lambda f: (f.kind, f.ranks, f.buffers, part_of(f.scope, SMALL))  # noqa: E731
    for f in off:
        on.remove(next(g for g in on if key(g) == key(f)))
    assert [(g.kind, g.ranks, g.buffers, part_of(g.scope, SMALL)) for g in on] == [
        ("all-gather", 8, (("f32", (BATCH, length, Q_R_P)),), "mla")
    ]


def test_no_gather_is_of_a_weight():
    for layout, length in ((BOTH, 1), (SPLIT, 1), (SPLIT, LENGTH)):
        for f in compiled(layout, length):
            if f.kind == "all-gather":
                assert f.buffers[0][1] in ((BATCH, length, Q_R_P), (BATCH, 1, W))


@pytest.mark.parametrize("layout", [SPLIT, SPLIT.replace(latent_moe=("tp", "cp"))], ids=["qkv_a", "qkv_a-latent"])
def test_kimi_k3_has_the_collectives_of_the_formula(layout):
    assert budget(layout, 1, SMALL_K3) == []
    routed = [f for f in compiled(layout, 1, SMALL_K3) if "/experts/" in f.scope]
    assert [(f.kind, f.values) for f in routed] == [("all-reduce", BATCH * (Z + D))]


def test_the_decode_loop_has_the_collectives_of_one_step():
    """`generate` runs steps in a loop of their own; sampling adds nothing."""
    from tests.layouts import outcome, spread

    model = spread(BOTH)
    outcome(model)
    (loop,) = model._burst.executables.values()
    kinds = lambda found: sorted((part_of(f.scope, SMALL), f.kind, f.ranks, f.values) for f in found)  # noqa: E731
    assert kinds(read(loop.as_text())) == kinds(compiled(BOTH, 1))


# ------------------------------------------------------------------------------------------------ a long context
SHORT, LONG = 1 << 10, 1 << 16


@functools.cache
def decode_with_room_for(capacity: int, cp: int) -> str:
    """The text of the decode step of a state of that capacity."""
    return compile_step(Model(SMALL, helix(8 // cp, cp), "float32"), BATCH, capacity).as_text()


def arrays_of_the_whole_cache(text: str) -> set[tuple[int, ...]]:
    """Shapes, as a device holds them, that have all LONG positions: along one axis, or as the stripes side by side."""
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\b[a-z]\w*\[([\d,]+)\]", text)}
    width = SMALL.kv_lora_rank + SMALL.qk_rope_head_dim
    return {
        shape
        for shape in shapes
        if LONG in shape or {8, LONG // 8} <= set(shape) or math.prod(shape) >= BATCH * LONG * width
    }


def test_a_decode_step_exchanges_the_same_with_room_for_1k_tokens_and_for_64k():
    short, long = (
        [(f.kind, f.ranks, f.buffers, f.scope) for f in read(decode_with_room_for(capacity, 8))]
        for capacity in (SHORT, LONG)
    )
    assert short == long
    assert {kind for kind, *_ in long} == {"all-reduce", "all-to-all", "all-gather"}


def test_no_device_holds_an_array_of_the_whole_cache_in_a_decode_step():
    assert arrays_of_the_whole_cache(decode_with_room_for(LONG, 8)) == set()
    width = SMALL.kv_lora_rank + SMALL.qk_rope_head_dim
    assert f"f32[{BATCH},1,{LONG // 8},{width}]" in decode_with_room_for(LONG, 8)  # a stripe
    assert (BATCH, 1, LONG, width) in arrays_of_the_whole_cache(decode_with_room_for(LONG, 1))  # of one there is


def test_a_cache_that_is_gathered_would_be_seen(monkeypatch):
    attention = mla.helix_attention

    def gathering(q_nope, q_pe, rows, cache, *rest, axis, **options):
        whole = jax.lax.all_gather(cache, axis, axis=1, tiled=True)
        out, cache = attention(q_nope, q_pe, rows, cache, *rest, axis=axis, **options)
        return out + 0 * whole.sum(), cache

    monkeypatch.setattr(mla, "helix_attention", gathering)
    text = compile_step(Model(SMALL, helix(1, 8), "float32"), BATCH, LONG).as_text()
    assert arrays_of_the_whole_cache(text)


# ------------------------------------------------------------------------------------------ what breaks the budget
def test_a_weight_split_along_the_wrong_axis_breaks_the_budget(monkeypatch):
    """XLA makes any placement give right numbers; what a wrong one costs shows in the collectives."""
    plain = mla.declare

    def wrong(shape, names, dtype, *, init="fan_in"):
        if names == (axes.EMBED, axes.HEADS_MERGED, None):  # o_proj
            names = (axes.HEADS_MERGED, None, None)
        return plain(shape, names, dtype, init=init)

    monkeypatch.setattr(mla, "declare", wrong)
    found = read(compile_step(Model(SMALL, BOTH, "float32"), BATCH, CAPACITY, 1).as_text())
    assert differences(found, needed(SMALL, BOTH, "float32"), SMALL, BATCH, 1)


def test_a_gathered_weight_breaks_the_budget(monkeypatch):
    def gather_weight(self, x, weight):
        return mla.project(x, self.layout.constrain(weight, None, None))

    monkeypatch.setattr(mla.LowRankMLA, "_down", gather_weight)
    found = read(compile_step(Model(SMALL, SPLIT, "float32"), BATCH, CAPACITY, 1).as_text())
    assert [f.buffers[0][1] for f in found if f.kind == "all-gather"] == [(Q_R_P, D), (BATCH, 1, W)]
    less, more = differences(found, needed(SMALL, SPLIT, "float32"), SMALL, BATCH, 1)
    assert less == f"mla: 0 x all-gather of {BATCH * Q_R_P} values over 8 ranks, 1 by formula"
    assert more.endswith(f": 1 x all-gather of {Q_R_P * D:,} values over 8 ranks, 0 by formula")


# ------------------------------------------------------------------------------------------------------- formula
def test_the_formula_gives_kimi_k3s_bytes():
    """docs of helix, section 2a: payloads of one decoded token of K3 at tp = 1."""
    by = {(c.part, c.kind): c for c in needed(KIMI_K3, helix(1, 8), "bfloat16")}
    assert by["mla", "all-to-all"].payload == 96 * 513 * 4  # float32 partial outputs and one statistic a head
    assert by["mla", "all-reduce"].payload == 14_336
    assert by["kda", "all-reduce"].times == 69 and by["mla", "all-reduce"].times == 24
    assert by["moe", "all-reduce"].payload == (3584 + 7168) * 4 and by["moe", "all-reduce"].times == 92
    assert by["head", "all-gather"].payload == 163_840 * 4
    assert ("mla", "all-gather") not in by


def test_a_ring_sends_all_but_a_rank_s_share():
    gather = Collective("mla", 1, "all-gather", axes.QKV_A, 16, 2112, "bfloat16")
    assert (gather.payload, gather.sent) == (4224, 3960)
    reduce = gather._replace(kind="all-reduce")
    assert reduce.sent == 2 * 3960


def test_one_rank_needs_nothing():
    assert needed(KIMI_K3, SINGLE, "bfloat16") == ()


def test_a_replicated_axis_needs_no_collective():
    parts = {c.over for c in needed(SMALL, SPLIT.replace(vocab=None, qkv_a=None), "float32")}
    assert parts == {axes.KDA_HEADS, axes.STRIPES, axes.HEADS_MERGED, axes.HIDDEN, axes.EXPERTS}


# -------------------------------------------------------------------------------------------------- reading text
MODULE = """HloModule jit_run, is_scheduled=true, num_partitions=8
  %a = f32[2,128]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add, metadata={op_name="jit(run)/layer_0/mlp/psum"}
  %b.1 = bf16[2,1,320]{2,1,0:T(8,128)} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={2}, metadata={op_name="jit(run)/while/body/head/x"}
  %c = (f32[1,2]{1,0}, /*index=1*/f32[1,2]{1,0}) all-to-all(%x, %y), replica_groups={{0,1},{2,3}}
  %d = f32[4]{0} all-reduce(%z), replica_groups=mesh['a'=2,'b'=4] {'a','b'}, to_apply=%add.3.clone_promoted
  %e = f32[4]{0} all-reduce(%z), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
  ROOT %f = f32[] all-reduce(%z), replica_groups={}, to_apply=%add
  %g = (bf16[16,4]{1,0}, bf16[128,4]{1,0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
  %h = bf16[128,4]{1,0} all-gather-done(%g)
  %i = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %j = f32[8]{0} collective-permute-done(%i)
  %k = f32[9]{0} all-reduce-start(%x), replica_groups=[1,8]<=[8], to_apply=%add
  %l = f32[9]{0} fusion(%all-reduce.1), calls=%fused
  %m = ((f32[5]{0}, f32[6]{0}), (f32[5]{0}, f32[6]{0})) all-reduce-start(%x, %y), replica_groups=[1,8]<=[8], to_apply=%add
"""  # noqa: E501


def test_every_form_in_which_xla_writes_a_collective_is_read():
    assert [(f.kind, f.ranks, f.buffers) for f in read(MODULE)] == [
        ("all-reduce", 4, (("f32", (2, 128)),)),
        ("all-gather", 4, (("bf16", (2, 1, 320)),)),
        ("all-to-all", 2, (("f32", (1, 2)), ("f32", (1, 2)))),
        ("all-reduce", 8, (("f32", (4,)),)),
        ("all-reduce", 4, (("f32", (4,)),)),
        ("all-reduce", 8, (("f32", ()),)),
        ("all-gather", 8, (("bf16", (128, 4)),)),
        ("collective-permute", 2, (("f32", (8,)),)),
        ("all-reduce", 8, (("f32", (9,)),)),
        ("all-reduce", 8, (("f32", (5,)), ("f32", (6,)))),
    ]
    assert [f.values for f in read(MODULE)][2] == 4
    assert [f.widened for f in read(MODULE)].index(True) == 3


@pytest.mark.parametrize(
    ("scope", "part"),
    [
        ("jit(run)/embed/jit(_take)/gather", "embedding"),
        ("jit(run)/while/body/layer_0/kda_output/dot_general", "kda"),
        ("jit(run)/layer_1/mla_attend/shard_map/combine/all_to_all", "mla"),
        ("jit(run)/layer_0/mlp/shard_map/psum", "dense"),
        ("jit(run)/layer_1/experts/shard_map/psum", "moe"),
        ("jit(run)/layer_1/jit(layer)/latent_up/dot_general", "moe"),
        ("jit(run)/layer_1/attn_res/mul", "attn_res"),
        ("jit(run)/head/sharding_constraint", "head"),
        ("jit(run)/copy", "jit(run)/copy"),
        ("", "unnamed"),
    ],
)
def test_scopes_name_parts_of_the_model(scope, part):
    assert part_of(scope, SMALL) == part


def test_what_is_missing_and_what_is_too_much_is_said():
    wanted = [Collective("kda", 1, "all-reduce", axes.KDA_HEADS, 8, D, "float32")]
    found = [Found("collective-permute", (("f32", (BATCH, D)),), 8, "jit(run)/layer_0/kda_project/x")]
    assert differences(found, wanted, SMALL, BATCH, 1) == [
        f"kda: 0 x all-reduce of {BATCH * D} values over 8 ranks, 1 by formula",
        f"kda: 1 x collective-permute of {BATCH * D} values over 8 ranks, 0 by formula",
    ]
    alone = [f._replace(ranks=1) for f in found]
    assert differences(alone, [], SMALL, BATCH, 1) == []
