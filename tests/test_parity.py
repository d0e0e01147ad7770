"""parity: good layouts pass; a broken rule is found, and in the layer where it is; files; what is refused."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import parity
from kimi_jax.__main__ import main
from kimi_jax.comparing.parity import every_layout, unreached
from kimi_jax.comparing.runs import Row, Seen, compare, run, run_alone
from kimi_jax.config import Config
from kimi_jax.layers import block
from kimi_jax.ops import helix as helix_op
from kimi_jax.ops import routing
from kimi_jax.runtime import Model
from kimi_jax.steps import Observed
from sharding_rules import SINGLE, helix
from tests.helpers import GOLDEN, worst
from tests.layouts import SMALL, one_device

BOTH = helix(2, 4, tokens_per_block=4)
FEW = dict(chunks=(8,), paddings=(0, 5), batches=(2,), max_new_tokens=3, progress=False)


def plain_mean(parts):
    return parts.out.mean(0)


@functools.cache
def good():
    return parity(SMALL, BOTH, **FEW)


def test_a_good_layout_passes_in_every_way_of_feeding_it():
    assert good().ok
    assert [(c.chunk, c.padding, c.batch) for c in good().cases] == [(8, 0, 2), (8, 5, 2)]
    for case in good().cases:
        assert 0 < case.error <= case.tolerance == 1e-5
        assert (case.layer, case.token, case.near_tie) == (None, None, False)
    assert "pass: 2 cases" in repr(good()) and "pass: 2 cases" in good()._repr_html_()


def test_a_broken_combine_is_found_in_the_first_mla_layer_and_gives_status_1(data, monkeypatch, capsys):
    """Held against a file; behind the first MLA layer everything differs too."""
    folder = data / "kimi-linear-random"
    options = [
        "parity", "--checkpoint", str(folder), "--golden", str(GOLDEN / "kimi-linear-random.npz"), "--layouts", "1x2",
        "--chunks", "32", "--paddings", "3", "--json",
    ]  # fmt: skip
    assert main(options) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert 0 < case["error"] <= case["tolerance"] == 2e-4
    assert (case["layer"], case["token"], case["ok"]) == (None, None, True)
    monkeypatch.setattr(helix_op, "merge", plain_mean)
    assert main(options) == 1
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert (case["layer"], case["ok"]) == (min(Config.from_hf(folder).mla_layers), False)
    assert case["error"] > 10 * case["tolerance"] and case["token"]


@pytest.mark.slow
def test_the_command_checks_the_checkpoint_in_the_package_against_one_device(monkeypatch, capsys):
    """Layers 3 and 7 are MLA; of each mesh the merged projection is tried whole and split."""
    options = "parity --layouts 1x2,2x4 --max-new-tokens 4".split()
    assert main(options) == 0
    assert "pass: 8 cases" in capsys.readouterr().out
    monkeypatch.setattr(helix_op, "merge", plain_mean)
    assert main(options) == 1
    text = capsys.readouterr().out
    assert "FAIL: 8 of 8 cases" in text and text.count("layer 3 (MLA)") == 9


class Recorder(Model):
    """Stands in for a model: takes what it is fed down."""

    config = SMALL

    def __init__(self):
        self.fed = []

    def new_state(self, batch, capacity):
        self.fed.append((batch, capacity))

    def observe(self, tokens, counts, state):
        self.fed.append((tokens.tolist(), counts.tolist()))
        zeros = np.zeros((1, *tokens.shape, 1))
        return Observed(zeros[0], zeros, zeros[..., 0]), None


def test_prompts_are_fed_in_chunks_with_junk_behind_them_and_rows_without_tokens_rest():
    rows = [Row(ids, [7, 8], Seen(np.ones((1, 1)), None, None)) for ids in ([1, 2, 3], [4], [5])]
    model, junk = Recorder(), SMALL.vocab_size - 1
    seen = run(model, rows, chunk=4, padding=2, batch=2)
    assert model.fed == [
        (2, 5),
        ([[1, 2, junk, junk], [4, junk, junk, junk]], [2, 1]),
        ([[3, junk, junk, junk], [junk] * 4], [1, 0]),
        ([[7], [7]], [1, 1]),
        (2, 5),
        ([[5, junk, junk, junk], [junk] * 4], [1, 0]),
        ([[7], [junk]], [1, 0]),
    ]
    assert [len(s.logits) for s in seen] == [4, 2, 2]  # the last token of a continuation is not fed


def test_a_broken_embedding_and_a_broken_head_are_told_apart():
    """Of what is right, one part is changed: the place is where the run leaves it."""
    (row,) = run_alone(one_device(), [[1, 2, 3]], 1)
    seen, right = row.right, row.right
    entered = right.hidden * np.array([2, 1, 1]).reshape(3, 1, 1)
    for changed, place in (
        (right._replace(hidden=entered), "embedding"),
        (right._replace(logits=-right.logits), "head"),
    ):
        found = compare([row._replace(right=changed)], [seen], 1e-5)
        assert found.layer == place
    assert compare([row], [seen], 1e-5).layer is None
    blind = row._replace(right=right._replace(hidden=None, logits=-right.logits))
    assert compare([blind], [seen], 1e-5).layer is None


def test_a_token_at_a_near_tie_is_reported_and_does_not_fail():
    logits = np.array([[1.0, 1.0 + 1e-6, 0.0], [0.0, 0.5, 1.0]], np.float32)
    seen = Seen(logits, None, None)
    close = compare([Row([0], [0, 2], Seen(logits, None, None))], [seen], 1e-5)
    assert (close.token, close.near_tie) == ((0, 0), True)
    far = compare([Row([0], [0, 1], Seen(logits, None, None))], [seen], 1e-5)
    assert (far.token, far.near_tie) == ((0, 1), False)


def test_logits_that_are_not_numbers_fail():
    right = np.ones((2, 3), np.float32)
    found = compare([Row([0], [0, 0], Seen(right, None, None))], [Seen(right * np.nan, None, None)], 1e-5)
    assert found.error == np.inf


def test_margins_are_those_between_the_last_expert_chosen_and_the_first_left_out():
    x, weight, bias = jnp.eye(2), jnp.array([[3.0, 0], [2, 0], [1, 0], [0, 0]]), jnp.array([0.0, 0, 0, 0.1])
    scores = np.asarray(jax.nn.sigmoid(x @ weight.T)) + np.asarray(bias)
    wanted = np.sort(scores)[:, ::-1]
    np.testing.assert_allclose(routing.margins(x, weight, bias, top_k=2), wanted[:, 1] - wanted[:, 2], rtol=1e-6)
    assert np.isinf(routing.margins(x, weight, bias, top_k=4)).all()


def test_near_routings_are_counted_in_the_reference():
    right = Seen(np.ones((2, 3), np.float32), None, np.array([[1e-6, 1.0], [2e-5, 1e-7]]))
    seen = Seen(right.logits, None, np.ones((2, 2)))
    assert compare([Row([0], [0, 0], right)], [seen], 1e-5).near_routings == 2


def test_observing_changes_nothing_and_sees_every_layer():
    model, ids = one_device(), [[7, 8, 9]]
    logits, _ = model.prefill(ids, None, model.new_state(1, 32))
    observed, state = model.observe(ids, None, model.new_state(1, 32))
    assert state.lengths.tolist() == [3]
    assert worst(np.asarray(observed.logits)[:, -1], np.asarray(logits)) <= 1e-6
    assert observed.hidden.shape == (1 + SMALL.num_hidden_layers, 1, 3, SMALL.hidden_size)
    assert np.array_equal(np.asarray(observed.hidden)[0, 0], np.asarray(model.params["embed"])[np.array(ids[0])])
    moe = sum(block.ffn_class(SMALL, i) is block.MoE for i in range(SMALL.num_hidden_layers))
    assert observed.margins.shape == (moe, 1, 3)


# -------------------------------------------------------------------------------------------- layouts, notes, errors
def test_every_layout_is_every_mesh_that_fits_with_the_merged_projection_whole_and_split(models):
    assert [(x.tp, x.cp, len(x.mesh_axes("qkv_a"))) for x in every_layout(SMALL, 8)] == [
        (tp, 8 // tp, split) for tp in (1, 2, 4, 8) for split in (0, 2)
    ]
    assert every_layout(SMALL, 1) == [helix(tokens_per_block=4)]
    no_q_lora = models("kimi-linear-random").config
    assert all(x.mesh_axes("qkv_a") == () for x in every_layout(no_q_lora, 2))
    with pytest.raises(ValueError, match="tp=1 x cp=3 does not fit"):
        every_layout(SMALL, 3)


def test_stripes_that_no_row_reaches_are_said():
    assert good().notes == ()
    (note,) = unreached([SINGLE, BOTH, helix(1, 8)], 39)
    assert "rows of up to 39 tokens reach 1 of 8 stripes" in note


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(layouts=helix(1, 3)), "tp=1 x cp=3 does not fit"),
        (dict(layouts=helix(16, 1)), "16"),
        (dict(chunks=(4,), paddings=(4,)), "padding 4 leaves no column of chunk 4"),
        (dict(chunks=()), "chunks="),
        (dict(batches=(0,)), "batches="),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(layouts=SINGLE, golden="nowhere.npz"), "golden='nowhere.npz' is not an .npz file"),
        (dict(layouts=SINGLE, golden=GOLDEN / "kimi-linear-tiny.npz"), "Is it of another checkpoint"),
        (dict(layouts=SINGLE, golden=GOLDEN / "kimi-linear-tiny.npz", prompts=[[1]]), "leave prompts out"),
        (dict(layouts=SINGLE, prompts="text"), "no tokenizer"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        parity(SMALL, **{"progress": False, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--layouts 1x3", "tp=1 x cp=3 does not fit"),
        ("--layouts 1x2 --rule experts=cp", "routed and shared experts are summed in one all-reduce"),
        ("--layouts 1x2 --rule nothing", "AXIS=MESH"),
    ],
)
def test_bad_options_are_one_line_and_status_2(capsys, options, message):
    assert main(["parity", *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_list_that_is_none_is_a_usage_error():
    with pytest.raises(SystemExit) as ended:
        main(["parity", "--layouts", "8"])
    assert ended.value.code == 2
