"""What several test files need: golden files, logits of several prompts, what a GPU is given, two measures of error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from kimi_jax.runtime import Model

GOLDEN = Path(__file__).parent / "data" / "golden"
GPU = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
ONE_GPU = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=GPU)


def golden(name: str) -> dict[str, np.ndarray]:
    """The oracle's answers for one checkpoint."""
    with np.load(GOLDEN / f"{name}.npz") as data:
        return dict(data)


def logits_of_each(model: Model, prompts: list[np.ndarray]) -> list[np.ndarray]:
    """Logits [T, W] of each prompt of T tokens, run as one batch, padded at the end: one program for all lengths."""
    lengths = [len(ids) for ids in prompts]
    tokens = np.zeros((len(prompts), max(lengths)), int)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    logits = np.asarray(model.logits(tokens, lengths))
    return [row[:length] for row, length in zip(logits, lengths, strict=True)]


def lowered_for_a_gpu(call: Callable, *structs: Any) -> str:
    """The text of a call with arrays of these shapes and dtypes. Needs no GPU."""
    with jax.sharding.use_abstract_mesh(ONE_GPU):
        # A new function: what was traced for a CPU is kept by function.
        return jax.jit(lambda *arrays: call(*arrays)).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


def worst(mine: np.ndarray, wanted: np.ndarray) -> float:
    """The largest error, as a part of the largest wanted value."""
    assert mine.shape == wanted.shape, (mine.shape, wanted.shape)
    return float(np.abs(mine.astype(np.float64) - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def relative_rms(mine: np.ndarray, wanted: np.ndarray) -> float:
    """Root mean square of the error over that of the wanted values."""
    return float(
        np.sqrt(np.mean((mine.astype(np.float64) - wanted) ** 2) / np.mean(np.square(wanted, dtype=np.float64)))
    )
