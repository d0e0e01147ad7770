"""Helix: the striped latent cache, the combine and the states that move between layouts, against one device.

What must hold for every length: prompts that leave ranks empty, that end on a block's edge, that turn the ownership
over several times. Attention is tried flat and sharply peaked: a loose tolerance on flat attention cannot see a wrong
log base or a plain mean.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax
from kimi_jax.generate import feed
from kimi_jax.ops import helix as ops
from kimi_jax.ops.attention import Partial
from sharding_rules import helix, stripes
from tests.helpers import worst

EXACT = 1e-5
LAYOUTS = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1)]


@pytest.fixture(scope="module")
def config(models):
    """kimi-linear-random cut to three layers: KDA + dense, KDA + MoE, MLA + MoE."""
    return dataclasses.replace(models("kimi-linear-random").config, num_hidden_layers=3, mla_layers=(2,))


@pytest.fixture(scope="module")
def build(config):
    """build(layout) -> the same random weights on that layout, made once."""
    made = {}

    def get(layout, sharpness=1.0):
        key = (layout, sharpness)
        if key not in made:
            model = kimi_jax.random_model(config, layout=layout, dtype="float32", seed=3)
            attention = model.params["layers"][2]["attention"]
            attention["q"] = attention["q"] * np.float32(sharpness)
            made[key] = model
        return made[key]

    return get


def logits_of_steps(model, ids, prompts, steps):
    """Prefill a ragged batch, then feed the same tokens everywhere: logits [1 + steps, B, W]."""
    batch = len(prompts)
    state = model.new_state(batch, max(map(len, prompts)) + steps)
    logits, state = feed(model, prompts, state)
    out = [np.asarray(logits)]
    for step in range(steps):
        logits, state = model.decode(np.full(batch, ids[step]), state)
        out.append(np.asarray(logits))
    return np.stack(out)


def ids_of(config, count, seed=5):
    return np.random.default_rng(seed).integers(0, config.vocab_size, count).tolist()


def lengths_for(block, cp):
    """Every length up to two rounds and one for block 4; around the edges of blocks and rounds for the others."""
    if block == 4:
        return list(range(1, 2 * cp * block + 2))
    edges = [1, 2, block, block + 1, cp * block, cp * block + 1, 2 * cp * block + 1]
    return sorted({length for edge in edges for length in (edge - 1, edge) if 1 <= length <= 2 * cp * block + 1})


@pytest.mark.parametrize("block", [1, 4, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_every_length_and_40_steps_equal_one_device(build, config, tp, cp, block):
    ids = ids_of(config, max(40, 2 * 8 * block + 1))
    prompts = [ids[:length] for length in lengths_for(block, cp)]
    alone = logits_of_steps(build(helix()), ids, prompts, 40)
    spread = logits_of_steps(build(helix(tp, cp, tokens_per_block=block)), ids, prompts, 40)
    assert worst(spread, alone) <= EXACT
    assert np.array_equal(spread.argmax(-1), alone.argmax(-1))


@pytest.mark.parametrize("sharpness", [0.0, 6.0])
@pytest.mark.parametrize(("tp", "cp"), [(1, 8), (2, 4)])
def test_flat_and_peaked_attention_are_exact_with_empty_stripes(build, config, tp, cp, sharpness):
    """1 to 7 tokens on 8 ranks, one row never used."""
    ids = ids_of(config, 7, seed=6)
    prompts = [ids[:n] for n in range(1, 8)]
    alone = logits_of_steps(build(helix(), sharpness), ids, prompts, 4)
    spread = logits_of_steps(build(helix(tp, cp, tokens_per_block=1), sharpness), ids, prompts, 4)
    assert np.isfinite(spread).all()
    assert worst(spread, alone) <= EXACT


def test_an_unused_row_of_a_batch_is_finite_and_disturbs_nobody(build, config):
    ids = ids_of(config, 9)
    model = build(helix(1, 8, tokens_per_block=1))
    logits, state = model.prefill(np.array([ids, [0] * 9]), [9, 0], model.new_state(2, 32))
    alone, _ = build(helix()).prefill(np.array([ids]), None, build(helix()).new_state(1, 32))
    assert np.isfinite(np.asarray(logits)).all()
    assert worst(np.asarray(logits)[:1], np.asarray(alone)) <= EXACT
    assert state.lengths.tolist() == [9, 0]


# The combine by itself


def partials(scores, values):
    """Each rank's exact partial over its keys; scores [N, keys] (-inf: no such key), values [N, keys, V]."""
    top = np.where(np.isinf(scores.max(1, keepdims=True)), 0, scores.max(1, keepdims=True))
    weight = np.exp(scores - top)
    total = weight.sum(1)
    out = np.einsum("nk,nkv->nv", weight, values) / np.where(total > 0, total, 1)[:, None]
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(np.where(total > 0, total, 1)) + top[:, 0], -np.inf)
    shape = (len(scores), 1, 1, 1)
    return Partial(jnp.asarray(out.reshape(*shape, -1), jnp.float32), jnp.asarray(lse.reshape(shape), jnp.float32))


def whole(scores, values):
    flat = scores.reshape(-1)
    weight = np.exp(flat - flat.max())
    return (weight / weight.sum()) @ values.reshape(len(flat), -1)


def merged_with(weights_of, parts):
    """`ops.merge` with another rule for the weights of the parts."""
    weights = weights_of(parts.lse)
    return (weights[..., None] * parts.out).sum(0) / weights.sum(0)[..., None]


MUTANTS = {
    "log2 taken for ln": lambda lse: jnp.exp2(lse - lse.max(0, keepdims=True)),
    "ln taken for log2": lambda lse: jnp.exp((lse - lse.max(0, keepdims=True)) / np.float32(np.log(2))),
    "a plain mean": jnp.ones_like,
}


@pytest.mark.parametrize("sharpness", [0.2, 6.0])
def test_merge_is_exact_and_its_mutants_are_not(sharpness):
    rng = np.random.default_rng(2)
    scores, values = sharpness * rng.normal(size=(8, 50)), rng.normal(size=(8, 50, 5))
    scores[:, 25:] = np.where(rng.random((8, 25)) < 0.5, -np.inf, scores[:, 25:])  # stripes of several lengths
    parts, wanted = partials(scores, values), whole(scores, values)
    assert worst(np.asarray(ops.merge(parts))[0, 0, 0], wanted) <= EXACT
    for name, weights_of in MUTANTS.items():
        assert worst(np.asarray(merged_with(weights_of, parts))[0, 0, 0], wanted) > 100 * EXACT, name
    tops = jnp.asarray(scores.max(1).reshape(8, 1, 1, 1), jnp.float32)
    dropped_sum = merged_with(lambda lse: jnp.exp(tops - tops.max()), parts)
    assert worst(np.asarray(dropped_sum)[0, 0, 0], wanted) > 100 * EXACT


def test_an_empty_part_may_hold_nan_and_all_empty_gives_zero():
    scores, values = np.full((3, 4), -np.inf), np.ones((3, 4, 2))
    scores[1] = [0.1, 0.2, 0.3, 0.4]
    parts = partials(scores, values)
    poisoned = Partial(parts.out.at[0].set(jnp.nan).at[2].set(jnp.nan), parts.lse)
    assert np.array_equal(np.asarray(ops.merge(poisoned)), np.asarray(parts.out[1]))
    nobody = Partial(jnp.full_like(parts.out, jnp.nan), jnp.full_like(parts.lse, -jnp.inf))
    assert np.array_equal(np.asarray(ops.merge(nobody)), np.zeros((1, 1, 1, 2)))


@pytest.mark.parametrize(("tp", "cp"), [(2, 4), (4, 2), (1, 8), (8, 1)])
def test_each_rank_receives_the_head_chunk_of_its_rank(tp, cp):
    """Head ids through the exchange: rank t * cp + c must hold chunk t * cp + c, as o_proj's rows are split."""
    layout, heads = helix(tp, cp), 16
    out = jnp.broadcast_to(jnp.arange(heads, dtype=jnp.float32)[None, None, :, None], (1, 1, heads, 3))

    def body(out):
        stripe = ops.Stripe(("cp",), jax.lax.axis_index(("cp",)), cp, 64)
        return ops.combine(Partial(out, jnp.zeros(out.shape[:3])), stripe)

    mesh = layout.mesh()
    with jax.set_mesh(mesh):
        merged = jax.jit(layout.per_shard(body, [(None, None, "heads")], (None, None, "heads_merged")))(out)
    by_device = {shard.device: np.asarray(shard.data)[0, 0, :, 0] for shard in merged.addressable_shards}
    o_proj = jax.device_put(jnp.arange(heads), layout.sharding(mesh, "heads_merged"))
    for rank, device in enumerate(mesh.devices.flat):
        chunk = np.arange(heads).reshape(tp * cp, -1)[rank]
        assert by_device[device].tolist() == chunk.tolist()
        rows = next(np.asarray(s.data) for s in o_proj.addressable_shards if s.device == device)
        assert rows.tolist() == chunk.tolist()


def test_every_position_is_written_on_exactly_one_rank():
    block, ranks, batch, tokens = 4, 4, 2, 37
    rows = jnp.arange(1, batch * tokens + 1, dtype=jnp.float32).reshape(batch, tokens, 1)
    slots = stripes.capacity(tokens, block, ranks) // ranks
    positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
    live = positions < jnp.array([[tokens], [21]])
    held = []
    for rank in range(ranks):
        stripe = ops.Stripe(("cp",), jnp.int32(rank), ranks, block)
        held.append(np.asarray(ops.write_rows(jnp.zeros((batch, 1, slots, 1)), rows, positions, live, stripe))[:, 0])
    written = np.stack(held)  # [rank, batch, slot, 1]
    assert sorted(written[:, 0].ravel()[written[:, 0].ravel() > 0]) == list(range(1, tokens + 1))
    assert sorted(written[:, 1].ravel()[written[:, 1].ravel() > 0]) == list(range(tokens + 1, tokens + 22))


# What a layout costs


def test_the_split_of_work_is_what_the_table_says(build, config):
    for tp, cp in [(1, 8), (2, 4), (8, 1)]:
        model = build(helix(tp, cp, tokens_per_block=4))
        state = model.new_state(3, 64)
        for layer in state.cache.layers:
            for leaf in jax.tree.leaves(layer):
                shares = {shard.data.nbytes for shard in leaf.addressable_shards}
                parts = cp if hasattr(layer, "rows") else tp * cp
                assert shares == {leaf.nbytes // parts}


# States that move


def tokens_from(model, state, token, steps):
    out = []
    for _ in range(steps):
        logits, state = model.decode(token, state)
        token = np.asarray(logits).argmax(-1)
        out.append(token.tolist())
    return out, state, token


def test_a_state_moves_between_layouts_in_mid_generation(build, config, tmp_path):
    """8x1 -> 2x4 -> 1x8 -> 1x1, by `to` and by disk, with another block size each time: tokens as if it never moved."""
    prompts = [ids_of(config, 21), ids_of(config, 6, seed=9)]
    route = [helix(8, 1), helix(2, 4, tokens_per_block=4), helix(1, 8, tokens_per_block=1), helix()]
    alone = build(helix())
    logits, stay = feed(alone, prompts, alone.new_state(2, 80))
    token = np.asarray(logits).argmax(-1)
    wanted, _, _ = tokens_from(alone, stay, token, 24)
    first = build(route[0])
    logits, state = feed(first, prompts, first.new_state(2, 80))
    got, token = [], np.asarray(logits).argmax(-1)
    for hop, layout in enumerate(route):
        model = build(layout)
        if hop == 2:
            kimi_jax.save_state(state, tmp_path / "state")
            state = kimi_jax.load_state(model, tmp_path / "state")
        elif hop:
            state = state.to(layout)
        tokens, state, token = tokens_from(model, state, token, 6)
        got += tokens
    assert got == wanted


def test_moving_raw_arrays_between_layouts_is_wrong(build, config):
    """Stripes are in rank order: the same bytes under another layout are other positions."""
    source, target = build(helix(1, 4, tokens_per_block=1)), build(helix(1, 2, tokens_per_block=1))
    _, state = feed(source, [ids_of(config, 24)], source.new_state(1, 32))
    good, raw = state.to(target.layout), state.to(target.layout)
    layers = list(raw.cache.layers)
    rows = np.asarray(state.cache.layers[2].rows).reshape(layers[2].rows.shape)
    layers[2] = dataclasses.replace(layers[2], rows=jax.device_put(rows, layers[2].rows.sharding))
    raw._cache = dataclasses.replace(raw.cache, layers=tuple(layers))
    right, _ = target.decode([1], good)
    wrong, _ = target.decode([1], raw)
    assert worst(np.asarray(wrong), np.asarray(right)) > 100 * EXACT


def test_a_state_without_its_kda_layers_is_noticed(build, config):
    """A hand-over that moves only the latent cache gives fluent text and wrong logits."""
    model = build(helix(1, 2))
    _, state = feed(model, [ids_of(config, 24)], model.new_state(1, 32))
    lost = state.fork()
    zeroed = [layer if hasattr(layer, "rows") else jax.tree.map(jnp.zeros_like, layer) for layer in lost.cache.layers]
    lost._cache = dataclasses.replace(lost.cache, layers=tuple(zeroed))
    right, _ = model.decode([1], state)
    wrong, _ = model.decode([1], lost)
    assert worst(np.asarray(wrong), np.asarray(right)) > 100 * EXACT


def test_fork_gives_independent_rows(build, config):
    model = build(helix(1, 2))
    _, state = feed(model, [ids_of(config, 10)], model.new_state(1, 32))
    three = state.fork(3)
    assert three.lengths.tolist() == [10, 10, 10]
    logits, _ = model.decode([1, 2, 3], three)
    for i in range(3):
        alone, _ = model.decode([i + 1], state.fork())
        assert worst(np.asarray(logits)[i : i + 1], np.asarray(alone)) <= EXACT


@pytest.mark.parametrize(
    ("damage", "message"),
    [("absent", "holds no state"), ("dtype", "is float32, the model bfloat16"), ("config", "another configuration")],
)
def test_a_state_that_does_not_fit_is_refused(build, config, tmp_path, damage, message):
    model = build(helix())
    path = tmp_path / "state"
    if damage != "absent":
        kimi_jax.save_state(model.new_state(1, 32), path)
    if damage == "dtype":
        model = kimi_jax.random_model(config, dtype="bfloat16")
    if damage == "config":
        model = kimi_jax.random_model(dataclasses.replace(config, routed_scaling_factor=1.0), dtype="float32")
    with pytest.raises(ValueError, match=message):
        kimi_jax.load_state(model, path)


# Head padding


@pytest.mark.parametrize(("heads", "tp", "cp"), [(6, 2, 2), (6, 1, 4), (5, 1, 8), (5, 4, 2)])
def test_padded_heads_change_no_logit(config, heads, tp, cp):
    """6 heads on 4 ranks, 5 on 8: ranks that hold only padding add exact zeros."""
    odd = dataclasses.replace(config, num_attention_heads=heads)
    ids = ids_of(config, 30)
    with pytest.raises(ValueError, match="pad_heads=True"):
        kimi_jax.random_model(odd, layout=helix(tp, cp))
    make = partial(kimi_jax.random_model, odd, dtype="float32", seed=4)
    alone = logits_of_steps(make(), ids, [ids, ids[:3]], 6)
    padded = make(layout=helix(tp, cp, tokens_per_block=4, pad_heads=True))
    assert padded.params["layers"][2]["attention"]["o"].shape[1] == -(-heads // (tp * cp)) * tp * cp
    assert worst(logits_of_steps(padded, ids, [ids, ids[:3]], 6), alone) <= EXACT
