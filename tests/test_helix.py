"""Helix: the striped latent cache, the combine and the states that move between layouts, against one device.

What must hold for every length: prompts that leave ranks empty, that end on a block's edge, that turn the ownership
over several times. Attention is tried flat and sharply peaked: a loose tolerance on flat attention cannot see a wrong
log base or a plain mean.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax
from kimi_jax.config import Config
from kimi_jax.generation.generate import feed
from kimi_jax.ops import helix as ops
from kimi_jax.ops.attention import Partial
from kimi_jax.runtime import Model
from kimi_jax.state import State
from sharding_rules import Layout, helix, stripes
from tests.helpers import worst
from tests.layouts import SMALL, name, one_device, spread

EXACT = 1e-5
MLA = 1  # the layer of SMALL that is one
IDS = np.random.default_rng(5).integers(0, SMALL.vocab_size, 2 * 8 * 64 + 1).tolist()

# Compiling is what these tests cost, so nearly all of them use these layouts and steps of these shapes: rows that a
# test has no use for rest. 40 steps turn the ownership over at least twice on each of the quick layouts.
ROWS, WIDTH, CAPACITY = 65, 33, 160
CP8, TP2_CP4, TP4_CP2, TP8 = QUICK = (
    helix(1, 8, tokens_per_block=1),
    helix(2, 4, tokens_per_block=4),
    helix(4, 2, tokens_per_block=4),
    helix(8, 1, tokens_per_block=4),
)
MESHES = [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
REST = [
    layout for tp, cp in MESHES for block in (1, 4) if (layout := helix(tp, cp, tokens_per_block=block)) not in QUICK
]


def prefill(model: Model, prompts: list[list[int]], state: State | None = None, rows: int = ROWS):
    """Feed prompts to the first rows, in chunks of WIDTH -> logits [rows, W] after each one's last token, state."""
    out, state = np.zeros((rows, model.config.vocab_size), np.float32), state or model.new_state(rows, CAPACITY)
    for start in range(0, max(map(len, prompts)), WIDTH):
        tokens, counts = np.zeros((rows, WIDTH), int), np.zeros(rows, int)
        for row, prompt in enumerate(prompts):
            piece = prompt[start : start + WIDTH]
            tokens[row, : len(piece)], counts[row] = piece, len(piece)
        logits, state = model.prefill(tokens, counts, state)
        out[counts > 0] = np.asarray(logits)[counts > 0]
    return out, state


def logits_of_steps(model: Model, prompts: list[list[int]], steps: int, rows: int = ROWS) -> np.ndarray:
    """Feed prompts, then the same tokens to each: logits [1 + steps, B, W] of the rows that have a prompt."""
    logits, state = prefill(model, prompts, rows=rows)
    out = [logits]
    for step in range(steps):
        logits, state = model.decode(np.full(rows, IDS[step]), state)
        out.append(np.asarray(logits))
    return np.stack(out)[:, : len(prompts)]


EVERY_LENGTH = [IDS[:length] for length in range(1, ROWS + 1)]


@functools.cache
def right() -> np.ndarray:
    """One device's logits of every length and 65 steps."""
    return logits_of_steps(one_device(), EVERY_LENGTH, 65)


def check_every_length(layout: Layout) -> None:
    """Every length to two rounds of blocks and one (and up to 65 in any case), then two rounds and one, or 40 steps."""
    steps = max(40, 2 * layout.cp * layout.tokens_per_block + 1)
    found = logits_of_steps(spread(layout), EVERY_LENGTH, steps)
    assert worst(found, right()[: 1 + steps]) <= EXACT
    assert np.array_equal(found.argmax(-1), right()[: 1 + steps].argmax(-1))


def described(layout: Layout) -> str:
    return f"{name(layout)}-block{layout.tokens_per_block}"


@pytest.mark.parametrize("layout", QUICK, ids=described)
def test_every_length_and_two_rotations_equal_one_device(layout):
    check_every_length(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", REST, ids=described)
def test_every_length_and_two_rotations_equal_one_device_on_the_other_layouts(layout):
    check_every_length(layout)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "cp"), MESHES)
def test_blocks_of_64_equal_one_device_at_the_edges_and_over_two_rotations(tp, cp):
    """Lengths around the edges of blocks and rounds; on eight ranks 1025 steps."""
    edges = [1, 2, 64, 65, cp * 64, cp * 64 + 1, 2 * cp * 64 + 1]
    prompts = [IDS[:length] for length in sorted({n for edge in edges for n in (edge - 1, edge) if n})]
    steps = 2 * cp * 64 + 1

    def logits(model):
        state = model.new_state(len(prompts), len(prompts[-1]) + steps)
        new, state = feed(model, prompts, state)
        for step in range(steps):
            yield np.asarray(new)
            new, state = model.decode(np.full(len(prompts), IDS[step % 997]), state)
        yield np.asarray(new)

    largest, error = 0.0, 0.0
    for mine, wanted in zip(logits(spread(helix(tp, cp))), logits(one_device()), strict=True):
        largest, error = max(largest, np.abs(wanted).max()), max(error, np.abs(mine - wanted).max())
        assert np.array_equal(mine.argmax(-1), wanted.argmax(-1))
    assert error <= EXACT * largest


@pytest.fixture
def sharpened():
    """sharpened(model, by): the model with the scores of its attention multiplied, until the test ends."""
    changed = []

    def change(model, by):
        attention = model.params["layers"][MLA]["attention"]
        changed.append((attention, attention["q_b"]))
        attention["q_b"] = attention["q_b"] * np.float32(by)
        return model

    yield change
    for attention, before in changed:
        attention["q_b"] = before


@pytest.mark.parametrize("by", [0.0, 6.0])
def test_flat_and_peaked_attention_are_exact_with_empty_stripes(sharpened, by):
    """1 to 7 tokens on 8 ranks, the other rows never used."""
    prompts = [IDS[9 : 9 + n] for n in range(1, 8)]
    alone = logits_of_steps(sharpened(one_device(), by), prompts, 4)
    for layout in (CP8, TP2_CP4):
        found = logits_of_steps(sharpened(spread(layout), by), prompts, 4)
        assert np.isfinite(found).all()
        assert worst(found, alone) <= EXACT


def test_an_unused_row_of_a_batch_is_finite_and_disturbs_nobody():
    model, tokens = spread(CP8), np.zeros((ROWS, WIDTH), int)
    tokens[0, :9], tokens[2, :3] = IDS[:9], IDS[:3]
    counts = [9, 0, 3] + [0] * (ROWS - 3)
    logits, state = model.prefill(tokens, counts, model.new_state(ROWS, CAPACITY))
    assert np.isfinite(np.asarray(logits)).all()
    assert worst(np.asarray(logits)[[0, 2]], right()[0, [8, 2]]) <= EXACT
    assert state.lengths.tolist() == [9, 0, 3] + [0] * (ROWS - 3)


def served(model: Model, requests: list[tuple[int, int, list[int]]]) -> list[list[int]]:
    """Greedy tokens of requests (step at which it comes, new tokens it wants, prompt), each in a row of its own."""
    state, tokens = model.new_state(ROWS, CAPACITY), [[] for _ in requests]

    def take(logits, fed):
        chosen = np.asarray(logits).argmax(-1)
        for row, out in enumerate(tokens):
            if fed[row]:
                out.append(int(chosen[row]))

    for step in range(max(start + new for start, new, _ in requests)):
        live = [0 < len(out) < new for out, (_, new, _) in zip(tokens, requests, strict=True)]
        if any(live):
            last = [out[-1] if out else 0 for out in tokens] + [0] * (ROWS - len(tokens))
            counts = np.array(live + [False] * (ROWS - len(live)), int)
            logits, state = model.prefill(np.array(last)[:, None], counts, state)
            take(logits, counts)
        come = [prompt if start == step else [] for start, _, prompt in requests]
        if any(come):
            logits, state = prefill(model, come, state)
            take(logits, [bool(prompt) for prompt in come])
    return tokens


def test_requests_that_start_and_stop_at_different_times_equal_their_solo_runs():
    requests = [(0, 12, IDS[:30]), (3, 4, IDS[40:41]), (5, 10, IDS[50:63]), (9, 6, IDS[70:75])]
    found = served(spread(TP2_CP4), requests)
    assert [len(tokens) for tokens in found] == [12, 4, 10, 6]
    for tokens, (_, new, prompt) in zip(found, requests, strict=True):
        assert served(one_device(), [(0, new, prompt)]) == [tokens]


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
    for mutant, weights_of in MUTANTS.items():
        assert worst(np.asarray(merged_with(weights_of, parts))[0, 0, 0], wanted) > 100 * EXACT, mutant
    tops = jnp.asarray(scores.max(1).reshape(8, 1, 1, 1), jnp.float32)
    dropped_sum = merged_with(lambda lse: jnp.exp(tops - tops.max()), parts)
    assert worst(np.asarray(dropped_sum)[0, 0, 0], wanted) > 100 * EXACT


@pytest.mark.parametrize("where", ["out", "lse"])
def test_a_nan_of_a_part_that_saw_something_reaches_the_merged_output(where):
    parts = Partial(jnp.ones((2, 1, 1, 2, 4)), jnp.zeros((2, 1, 1, 2)))
    broken = parts._replace(**{where: getattr(parts, where).at[1, 0, 0, 1].set(jnp.nan)})
    np.testing.assert_array_equal(np.isnan(ops.merge(broken)).all(-1), [[[False, True]]])


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


def test_the_split_of_work_is_what_the_table_says():
    for tp, cp in [(1, 8), (2, 4), (8, 1)]:
        state = spread(helix(tp, cp, tokens_per_block=4)).new_state(3, 64)
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
        out.append(token[:2].tolist())
    return out, state, token


def test_a_state_moves_between_layouts_in_mid_generation(tmp_path):
    """8x1 -> 2x4 -> 1x8 -> 1x1, by `to` and by disk, with another block size each time: tokens as if it never moved."""
    prompts = [IDS[:21], IDS[30:36]]
    route = [TP8, TP2_CP4, CP8, helix()]
    assert [(x.tp, x.cp) for x in route] == [(8, 1), (2, 4), (1, 8), (1, 1)]
    logits, stay = prefill(one_device(), prompts)
    wanted, _, _ = tokens_from(one_device(), stay, np.asarray(logits).argmax(-1), 24)
    logits, state = prefill(spread(route[0]), prompts)
    got, token = [], np.asarray(logits).argmax(-1)
    for hop, layout in enumerate(route):
        model = one_device() if layout == helix() else spread(layout)
        if hop == 2:
            kimi_jax.save_state(state, tmp_path / "state")
            state = kimi_jax.load_state(model, tmp_path / "state")
        elif hop:
            state = state.to(layout)
        tokens, state, token = tokens_from(model, state, token, 6)
        got += tokens
    assert got == wanted


def test_moving_raw_arrays_between_layouts_is_wrong():
    """Stripes are in rank order: the same bytes under another layout are other positions."""
    target = spread(TP2_CP4)
    _, state = prefill(spread(CP8), [IDS[:24]])
    good, raw = state.to(TP2_CP4), state.to(TP2_CP4)
    layers = list(raw.cache.layers)
    rows = np.asarray(state.cache.layers[MLA].rows).reshape(layers[MLA].rows.shape)
    layers[MLA] = dataclasses.replace(layers[MLA], rows=jax.device_put(rows, layers[MLA].rows.sharding))
    raw._cache = dataclasses.replace(raw.cache, layers=tuple(layers))
    right, _ = target.decode([1] * ROWS, good)
    wrong, _ = target.decode([1] * ROWS, raw)
    assert worst(np.asarray(wrong)[:1], np.asarray(right)[:1]) > 100 * EXACT


def test_a_state_without_its_kda_layers_is_noticed():
    """A hand-over that moves only the latent cache gives fluent text and wrong logits."""
    model = spread(CP8)
    _, state = prefill(model, [IDS[:24]])
    lost = state.fork()
    zeroed = [layer if hasattr(layer, "rows") else jax.tree.map(jnp.zeros_like, layer) for layer in lost.cache.layers]
    lost._cache = dataclasses.replace(lost.cache, layers=tuple(zeroed))
    right, _ = model.decode([1] * ROWS, state)
    wrong, _ = model.decode([1] * ROWS, lost)
    assert worst(np.asarray(wrong)[:1], np.asarray(right)[:1]) > 100 * EXACT


def test_fork_gives_independent_rows():
    """One row forked and fed a different token each, against rows that were fed the same prompt each by itself."""
    model, tokens = spread(CP8), np.arange(ROWS)
    _, state = prefill(model, [IDS[:10]])
    many = state.row(0).fork(ROWS)
    assert many.lengths.tolist() == [10] * ROWS
    found, _ = model.decode(tokens, many)
    _, each = prefill(model, [IDS[:10]] * ROWS)
    wanted, _ = model.decode(tokens, each)
    assert worst(np.asarray(found), np.asarray(wanted)) <= EXACT
    again, _ = model.decode(tokens, state.row(0).fork(ROWS))  # the first forks were consumed, their origin was not
    assert np.array_equal(np.asarray(again), np.asarray(found))


@pytest.mark.parametrize(
    ("damage", "message"),
    [("absent", "holds no state"), ("dtype", "is float32, the model bfloat16"), ("config", "another configuration")],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path, damage, message):
    model, path = one_device(), tmp_path / "state"
    if damage != "absent":
        kimi_jax.save_state(model.new_state(1, 32), path)
    if damage == "dtype":
        model = Model(SMALL, helix(), "bfloat16")
    if damage == "config":
        model = Model(dataclasses.replace(SMALL, routed_scaling_factor=1.0), helix(), "float32")
    with pytest.raises(ValueError, match=message):
        kimi_jax.load_state(model, path)


# Head padding


def odd(heads: int) -> Config:
    """Eight KDA heads, and a number of MLA heads that the ranks do not divide."""
    return dataclasses.replace(SMALL, num_attention_heads=heads, kda_num_heads=8)


@functools.cache
def right_of(heads: int) -> np.ndarray:
    """One device's logits for `odd(heads)`."""
    return logits_of_steps(one_device(odd(heads)), [IDS[:30], IDS[:3]], 6, rows=2)


@pytest.mark.parametrize(
    ("heads", "tp", "cp"),
    [
        (6, 2, 2),
        (5, 1, 8),
        pytest.param(6, 1, 4, marks=pytest.mark.slow),
        pytest.param(5, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_padded_heads_change_no_logit(heads, tp, cp):
    """6 heads on 4 ranks, 5 on 8: ranks that hold only padding add exact zeros."""
    with pytest.raises(ValueError, match="pad_heads=True"):
        Model(odd(heads), helix(tp, cp), "float32")
    layout = helix(tp, cp, tokens_per_block=4, pad_heads=True)
    padded = kimi_jax.random_model(odd(heads), layout=layout, dtype="float32")
    assert padded.params["layers"][MLA]["attention"]["o"].shape[1] == -(-heads // (tp * cp)) * tp * cp
    found = logits_of_steps(padded, [IDS[:30], IDS[:3]], 6, rows=2)
    assert worst(found, right_of(heads)) <= EXACT
    assert np.array_equal(found.argmax(-1), right_of(heads).argmax(-1))
