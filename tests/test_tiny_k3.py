"""The K3 checkpoints that the package makes: the oracle reads them, the twin says the same, the seed decides all."""

import json

import numpy as np
import pytest

import kimi_jax
from kimi_jax.__main__ import main
from kimi_jax.testing import A_LOG_TAIL, TINY_K3, write_tiny_k3
from tests.checkpoints.making import stored
from tests.helpers import logits_of_each, worst
from tests.reference import oracle

PROMPTS = [np.arange(3, 3 + n) for n in (1, 17, 70)]  # the shapes of test_k3: compiled once for both


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_tiny_k3(tmp_path_factory.mktemp("tiny") / "k3", seed=5)


def logits(folder):
    return logits_of_each(kimi_jax.load(folder, dtype="float32", progress=False), PROMPTS)


def test_both_folders_give_the_oracles_logits_and_bitwise_the_same(folders):
    raw, params = oracle.load(folders[0])
    for packed, twin, ids in zip(*map(logits, folders), PROMPTS, strict=True):
        assert worst(packed, oracle.forward(raw, params, ids)) <= 2e-4
        assert np.array_equal(packed, twin)
        assert packed.std() > 0.5  # logits that differ from token to token


def test_the_folder_is_as_the_hub_has_it(folders):
    packed, twin = (stored(folder) for folder in folders)
    assert all(name.startswith("language_model.") for name in packed)
    assert {dtype for name, (dtype, *_) in packed.items() if name.endswith("_packed")} == {"U8"}
    assert not any("_packed" in name for name in twin)
    tails = [shape for name, (_, shape, _) in packed.items() if name.endswith("A_log")]
    assert tails == [(TINY_K3.kda_num_heads + A_LOG_TAIL,)] * len(TINY_K3.kda_layers)
    index = json.loads((folders[0] / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(packed) and len(set(index["weight_map"].values())) > 1
    assert json.loads((folders[0] / "config.json").read_text())["model_type"] == "kimi_k3"
    assert kimi_jax.Config.from_hf(folders[0]) == TINY_K3


def test_the_seed_decides_every_byte(folders, tmp_path, capsys):
    assert main(["tiny-k3", str(tmp_path / "again"), "--seed", "5"]) == 0
    assert str(tmp_path / "again-bf16") in capsys.readouterr().out
    assert stored(tmp_path / "again") == stored(folders[0])
    other, _ = write_tiny_k3(tmp_path / "other", seed=6)
    assert stored(other) != stored(folders[0])


def test_a_folder_that_is_taken_is_left_alone(tmp_path):
    (tmp_path / "k3-bf16").mkdir()
    (tmp_path / "k3-bf16" / "mine").touch()
    with pytest.raises(ValueError, match="k3-bf16 exists and is not empty"):
        write_tiny_k3(tmp_path / "k3")
    assert not (tmp_path / "k3").exists()
