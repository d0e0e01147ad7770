"""generate and stream: the same tokens whatever the company, padding and chunks; where rows end; what is refused.

Compiling is what these tests cost. Those that need text, or tokens of transformers, use the trained checkpoint with
prompts of up to 32 tokens, one of them or all four, and room for 128; the others use the small model of `layouts`.
"""

import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest

import kimi_jax
from kimi_jax import Greedy, MinP, Temperature, TopK, TopP
from tests import layouts
from tests.helpers import golden

GOLD = golden("kimi-linear-tiny")
PROMPTS = [GOLD[f"ids_{i}"].tolist() for i in range(4)]
GREEDY = [GOLD[f"greedy_{i}"].tolist() for i in range(4)]
SPACE, E = 32, 101


@pytest.fixture(scope="module")
def model(models):
    return models("kimi-linear-tiny")


@pytest.fixture
def endless(model, monkeypatch):
    """The model without EOS, for tests that name their own ends."""
    monkeypatch.setattr(model, "eos_token_ids", ())
    return model


@pytest.fixture(scope="module")
def small():
    """Random weights, no tokenizer, no EOS."""
    return layouts.one_device()


def test_greedy_text_equals_transformers_as_one_ragged_batch(model):
    outs = kimi_jax.generate(model, PROMPTS, max_new_tokens=64)
    assert [out.tokens for out in outs] == GREEDY
    assert [out.finish_reason for out in outs] == ["length"] * 4
    assert [out.text for out in outs] == [model.tokenizer.decode(tokens) for tokens in GREEDY]


@pytest.mark.parametrize("i", range(4))
def test_greedy_text_equals_transformers_alone(model, i):
    assert kimi_jax.generate(model, PROMPTS[i], max_new_tokens=64)[0].tokens == GREEDY[i]


def test_a_string_is_encoded_with_the_tokenizers_bos(model):
    text = model.tokenizer.decode(PROMPTS[0])
    assert model.tokenizer.encode(text) == PROMPTS[0]
    assert kimi_jax.generate(model, text, max_new_tokens=8)[0].tokens == GREEDY[0][:8]


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [2, 2, 0, 2]])
def test_the_order_and_the_neighbours_change_nothing(model, order):
    outs = kimi_jax.generate(model, [PROMPTS[i] for i in order], max_new_tokens=16)
    assert [out.tokens for out in outs] == [GREEDY[i][:16] for i in order]


@pytest.mark.parametrize(("capacity", "chunk"), [(200, None), (1024, 5), (88, 1)])
def test_capacity_and_chunk_change_nothing(small, capacity, chunk):
    usual, found = (
        kimi_jax.generate(small, layouts.PROMPTS, max_new_tokens=64, **options)
        for options in ({}, dict(capacity=capacity, prefill_chunk=chunk))
    )
    assert [out.tokens for out in found] == [out.tokens for out in usual]
    assert all(len(set(out.tokens)) > 8 for out in usual)


@pytest.mark.parametrize("sampling", [Temperature(0.8), TopK(5, 1.2), TopP(0.9), MinP(0.05, 0.7)])
def test_a_sampled_row_depends_on_its_own_seed_alone(small, sampling):
    about = dict(max_new_tokens=20, sampling=sampling)
    batch = kimi_jax.generate(small, layouts.PROMPTS, seed=11, **about)
    for i in range(4):
        alone = kimi_jax.generate(small, layouts.PROMPTS[i], seed=[11 + i], **about)
        assert alone[0].tokens == batch[i].tokens
    other = kimi_jax.generate(small, layouts.PROMPTS, seed=99, **about)
    assert [o.tokens for o in other] != [o.tokens for o in batch]


def test_stream_gives_the_tokens_and_text_of_generate(model):
    pieces = list(kimi_jax.stream(model, PROMPTS[1], max_new_tokens=64))
    assert [token for piece in pieces for token in piece.tokens] == GREEDY[1]
    assert "".join(piece.text for piece in pieces) == model.tokenizer.decode(GREEDY[1])
    assert len(pieces) > 1


def test_logprobs_are_those_of_the_logits(small):
    prompt = layouts.PROMPTS[3]
    out = kimi_jax.generate(small, prompt, max_new_tokens=6, logprobs=True)[0]
    logits = small.logits(np.array([prompt + out.tokens]))[0, len(prompt) - 1 : -1]
    wanted = jax.nn.log_softmax(logits)[np.arange(6), np.array(out.tokens)]
    np.testing.assert_allclose(out.logprobs, wanted, atol=1e-4)


# Where a row ends


def until(tokens: list[int], stops: set[int]) -> list[int]:
    """The tokens before the first stop."""
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0]] if ends else tokens


@pytest.mark.parametrize("eos", [(SPACE,), (E, ord(",")), (ord("L"),), (GREEDY[0][0], GREEDY[3][5])])
def test_rows_that_end_at_different_times_equal_their_solo_runs(endless, monkeypatch, eos):
    """Among them an EOS as the very first token, which leaves no tokens at all."""
    monkeypatch.setattr(endless, "eos_token_ids", eos)
    batch = kimi_jax.generate(endless, PROMPTS, max_new_tokens=64)
    for i in range(4):
        wanted = until(GREEDY[i], set(eos))
        assert batch[i].tokens == wanted
        assert batch[i].finish_reason == ("stop" if len(wanted) < 64 else "length")
        alone = kimi_jax.generate(endless, PROMPTS[i], max_new_tokens=64)[0]
        assert (alone.tokens, alone.text, alone.finish_reason) == (
            batch[i].tokens,
            batch[i].text,
            batch[i].finish_reason,
        )


def test_a_stop_token_ends_a_row_like_an_eos(endless):
    out = kimi_jax.generate(endless, PROMPTS[0], max_new_tokens=64, stop=[ord("h")])[0]
    assert (out.tokens, out.finish_reason) == (until(GREEDY[0], {ord("h")}), "stop")


@pytest.mark.parametrize("stop", ["the sea", ["LORD,", "will do"], "zz"])
def test_a_stop_string_across_token_borders_is_cut_from_text_and_tokens(endless, stop):
    """Every token is one byte, so every longer string crosses borders."""
    strings = [stop] if isinstance(stop, str) else stop
    batch = kimi_jax.generate(endless, PROMPTS, max_new_tokens=64, stop=stop)
    for i, out in enumerate(batch):
        whole = bytes(GREEDY[i]).decode()
        cuts = [whole.find(s) for s in strings if s in whole]
        assert out.text == (whole[: min(cuts)] if cuts else whole)
        assert bytes(out.tokens).decode() == out.text
        assert out.finish_reason == ("stop" if cuts else "length")
        pieces = list(kimi_jax.stream(endless, PROMPTS[i], max_new_tokens=64, stop=stop))
        assert "".join(piece.text for piece in pieces) == out.text
        assert [token for piece in pieces for token in piece.tokens] == out.tokens


# A kept state


def test_a_kept_state_continues_as_if_never_interrupted(model):
    first = kimi_jax.generate(model, PROMPTS, max_new_tokens=20, keep_state=True)
    for i, out in enumerate(first):
        assert out.state.lengths.tolist() == [len(PROMPTS[i]) + 19]  # the last token was drawn and not fed
        again = kimi_jax.generate(model, [[]], max_new_tokens=30, state=out.state)[0]
        assert out.tokens + again.tokens == GREEDY[i][:50]
        assert out.state.lengths.tolist() == [len(PROMPTS[i]) + 19]  # not consumed


def test_a_conversation_equals_one_prompt_of_all_its_turns(model):
    first = kimi_jax.generate(model, PROMPTS[3], max_new_tokens=10, keep_state=True)[0]
    turn = [10, 65, 110, 100]
    second = kimi_jax.generate(model, turn, max_new_tokens=10, state=first.state)[0]
    whole = kimi_jax.generate(model, PROMPTS[3] + first.tokens + turn, max_new_tokens=10)[0]
    assert second.tokens == whole.tokens


@pytest.mark.parametrize("stop", ["the sea", [SPACE]])
def test_a_state_kept_at_a_stop_is_the_one_at_the_stop(endless, stop):
    """Not the one at the end of the burst: KDA's state cannot be rewound."""
    out = kimi_jax.generate(endless, PROMPTS[0], max_new_tokens=64, stop=stop, keep_state=True)[0]
    drawn = len(out.tokens) + (1 if stop == [SPACE] else len("the sea"))
    assert out.state.lengths.tolist() == [len(PROMPTS[0]) + drawn - 1]
    rest = kimi_jax.generate(endless, [[]], max_new_tokens=64 - drawn, state=out.state)[0]
    assert rest.tokens == GREEDY[0][drawn:]


# Running


def test_a_second_call_of_the_same_bucket_compiles_nothing(small):
    prompts = [[7, *prompt] for prompt in layouts.PROMPTS[:2]]
    kimi_jax.generate(small, prompts, max_new_tokens=40, sampling=Temperature(0.5), logprobs=True)
    compiled = []
    listener = lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        shorter = [prompt[:-1] for prompt in prompts]
        kimi_jax.generate(small, shorter, max_new_tokens=35, sampling=Temperature(0.9), seed=5, logprobs=True)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == []


def test_ctrl_c_ends_within_a_second_and_leaves_the_model_usable(small, ctrl_c):
    about = dict(max_new_tokens=8000, capacity=8192)
    before = kimi_jax.generate(small, layouts.PROMPTS[3], max_new_tokens=8)[0].tokens
    kimi_jax.generate(small, layouts.PROMPTS, **about | dict(max_new_tokens=2))  # compile what follows
    sent = []

    def interrupt():
        sent.append(time.monotonic())
        signal.raise_signal(signal.SIGINT)

    timer = threading.Timer(0.5, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        kimi_jax.generate(small, layouts.PROMPTS, **about)
    assert time.monotonic() - sent[0] < 1.0
    assert kimi_jax.generate(small, layouts.PROMPTS[3], max_new_tokens=8)[0].tokens == before


def test_nan_logits_raise_with_row_and_step_and_never_become_a_token(model):
    norm = model.params["norm"]
    try:
        model.params["norm"] = norm * np.float32(np.nan)
        with pytest.raises(FloatingPointError, match=r"row 0 are not finite at new token 0"):
            kimi_jax.generate(model, PROMPTS[0], max_new_tokens=4)
    finally:
        model.params["norm"] = norm


def test_nan_in_one_step_names_that_step(model):
    embed = model.params["embed"]
    try:
        fed = next(i for i, token in enumerate(GREEDY[0]) if token not in PROMPTS[0])  # so the NaN enters here
        model.params["embed"] = embed.at[GREEDY[0][fed]].set(np.nan)
        with pytest.raises(FloatingPointError, match=rf"not finite at new token {fed + 1};"):
            kimi_jax.generate(model, PROMPTS[0], max_new_tokens=64)
    finally:
        model.params["embed"] = embed


# What is refused


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([1] * 480, dict(max_new_tokens=64, capacity=512), "capacity=512 is too small: prompt 480 .* 64 needs 544"),
        ([], {}, "prompts is empty"),
        ([[]], {}, "prompt 0 is empty"),
        ([True], {}, "token id in prompt 0=True: a whole number"),
        (b"In", {}, "prompts=b'In': a string, a list of token ids"),
        ([73, "In"], {}, "prompt 0 is 73: a string"),
        (["\ud800"], {}, "is not text that can be encoded"),
        ([1], {"seed": True}, "seed=True: a whole number"),
        ([[1], [320]], {}, "prompt 1 has token id 320; the vocabulary has 0 to 319"),
        ([[-1]], {}, "token id -1"),
        ("a", dict(max_new_tokens=0), "max_new_tokens=0"),
        ("a", dict(prefill_chunk=0), "prefill_chunk=0"),
        ("a", dict(stop=""), "empty"),
        (["a", "b"], dict(seed=[1]), "seed has 1 numbers for 2 prompts"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        kimi_jax.generate(model, prompts, **options)


def test_strings_without_a_tokenizer_are_refused(small):
    with pytest.raises(ValueError, match="prompt 0 is a string, but the checkpoint has no tokenizer"):
        kimi_jax.generate(small, "In the")
    with pytest.raises(ValueError, match="stop='x' is a string"):
        kimi_jax.generate(small, [1, 2], stop="x")
    assert kimi_jax.generate(small, [1, 2], max_new_tokens=3, sampling=Greedy())[0].text is None


def test_a_consumed_state_says_to_fork(small):
    state, tokens = small.new_state(1, 128), np.array([layouts.PROMPTS[2]])
    kept = state.fork()
    leaves = jax.tree.leaves(state.cache)
    logits, after = small.prefill(tokens, None, state)
    assert all(leaf.is_deleted() for leaf in leaves)  # donated
    with pytest.raises(ValueError, match=r"consumed .*fork"):
        small.decode([1], state)
    same, _ = small.prefill(tokens, None, kept)
    assert np.array_equal(np.asarray(logits), np.asarray(same))
    assert after.lengths.tolist() == [tokens.size]


def test_decode_compiles_once_and_donates_its_state(small):
    state = small.new_state(1, 128)
    logits, state = small.prefill(np.array([layouts.PROMPTS[2]]), None, state)
    logits, state = small.decode(np.asarray(logits).argmax(-1), state)
    before = len(small._extend.executables)
    for _ in range(3):
        leaves = jax.tree.leaves(state.cache)
        logits, state = small.decode(np.asarray(logits).argmax(-1), state)
        assert all(leaf.is_deleted() for leaf in leaves)
    assert len(small._extend.executables) == before


def test_a_state_that_is_too_small_is_refused_before_it_is_touched(model):
    state = model.new_state(1, 64)
    with pytest.raises(ValueError, match=r"capacity=64 is too small: row 0 would hold 65 tokens"):
        model.prefill(np.ones((1, 65), int), None, state)
    assert state.lengths.tolist() == [0]


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([[1.5]], None, "whole numbers"),
        ([1, 2], None, r"\[batch, length\]"),
        ([[1, 999]], None, "ids from 1 to 999"),
        ([[1, 2]], [3], "lengths=\\[3\\]"),
    ],
)
def test_tokens_are_checked_at_the_border(model, tokens, lengths, message):
    with pytest.raises(ValueError, match=message):
        model.logits(np.array(tokens), lengths)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [(None, (257,)), ('{"eos_token_id": 9}', (9,)), ('{"eos_token_id": [9, 7]}', (9, 7)), ("{}", (257,))],
)
def test_the_eos_ids_are_those_of_generation_config_and_else_of_config(tiny, tmp_path, said, wanted):
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny, folder)
    (folder / "generation_config.json").unlink()
    if said is not None:
        (folder / "generation_config.json").write_text(said)
    assert kimi_jax.load(folder, progress=False).eos_token_ids == wanted


def test_an_eos_id_outside_the_vocabulary_is_refused(tiny, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 900]}')
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id=\[9, 900\]: ids from 0 to"):
        kimi_jax.load(folder, progress=False)


def test_a_text_that_continues_a_state_brings_no_bos(model):
    begun = kimi_jax.generate(model, "In the", max_new_tokens=3, keep_state=True)[0]
    ids = model.tokenizer.encode("In the")
    more = model.tokenizer.encode(" and")[1:]  # without its BOS
    whole = kimi_jax.generate(model, [*ids, *begun.tokens, *more], max_new_tokens=6)[0].tokens
    assert kimi_jax.generate(model, " and", state=begun.state, max_new_tokens=6)[0].tokens == whole


def test_a_state_of_another_model_is_refused(model, tiny):
    other = kimi_jax.load(tiny, dtype="bfloat16", progress=False)
    with pytest.raises(ValueError, match="state belongs to another model"):
        kimi_jax.generate(other, [1], state=model.new_state(1, 64))
    with pytest.raises(ValueError, match="index=5: a whole number from 0 to 0"):
        model.new_state(1, 64).row(5)
