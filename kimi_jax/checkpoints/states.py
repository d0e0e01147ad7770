"""A `State` on disk: its arrays by orbax, and beside them what they are, so that any layout can continue them.

Must not know how a state is used; `State.to` deals the positions out again.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from kimi_jax import strict_json
from kimi_jax.checkpoints.appearing import appearing, refuse_taken
from kimi_jax.config import Config
from kimi_jax.processes import agree, is_first
from kimi_jax.state import Cache, State, cache_shapes
from sharding_rules import DeviceMesh, Layout

ABOUT = "state.json"


def save_state(state: State, path: str | os.PathLike[str]) -> None:
    """Write a state into the new folder `path`; it appears whole, by one rename.

    Raises ValueError if `path` exists and is not empty.
    """
    import orbax.checkpoint as ocp  # takes a second; only states and saves need it

    path = Path(path)
    agree("save_state", path=str(path), there=path.exists(), lengths=state.lengths, pending=state.pending)
    refuse_taken(path)
    with appearing(path) as unfinished:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(os.path.abspath(unfinished / "arrays"), _tree(state.cache))
        about = {
            "config": state.config.to_hf(),
            "layout": dataclasses.asdict(state.layout),
            "dtype": str(state.dtype),
            "capacity": state.capacity,
            "lengths": state.lengths.tolist(),
            "pending": None if state.pending is None else state.pending.tolist(),
        }
        if is_first():
            (unfinished / ABOUT).write_text(json.dumps(about))


def read_state(
    path: str | os.PathLike[str], config: Config, layout: Layout, mesh: DeviceMesh, dtype: DTypeLike
) -> State:
    """Read a state that `save_state` wrote onto a layout, whichever one it was saved from.

    Raises ValueError if the folder holds none, or one of another configuration or dtype.
    """
    import orbax.checkpoint as ocp

    path = Path(path)
    if not (path / ABOUT).is_file():
        raise ValueError(f"path={str(path)!r} holds no state that kimi_jax.save_state wrote")
    about = strict_json.read_object(path / ABOUT)
    if Config.from_hf(about["config"]) != config:
        raise ValueError(f"the state in {path} belongs to a model of another configuration")
    if about["dtype"] != str(dtype):
        raise ValueError(f"the state in {path} is {about['dtype']}, the model {dtype}; load the model in that dtype")
    was = _layout(about["layout"])
    lengths = np.array(about["lengths"], np.int32)
    shapes = cache_shapes(config, was, len(lengths), about["capacity"], dtype)
    with ocp.PyTreeCheckpointer() as checkpointer:
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), _tree(shapes))
        arrays = checkpointer.restore(os.path.abspath(path / "arrays"), item=_tree(shapes), restore_args=as_numpy)
    cache = jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in _tree(shapes)])
    for name, found in arrays.items():
        if found.shape != (wanted := _tree(shapes)[name]).shape or found.dtype != wanted.dtype:
            raise ValueError(
                f"{path}: array {name} is {found.dtype} {found.shape}; {ABOUT} says {wanted.dtype} {wanted.shape}"
            )
    pending = None if about["pending"] is None else np.array(about["pending"], np.int32)
    return State(cache, config, was, mesh, lengths, pending).to(layout, list(mesh.devices.flat))


def _tree(cache: Cache) -> dict[str, Any]:
    """The arrays by name, "layers.3.rows", in the order of the leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(cache)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _layout(said: dict[str, Any]) -> Layout:
    rules = tuple((name, tuple(mesh_axes)) for name, mesh_axes in said["rules"])
    return Layout(**{**said, "rules": rules})
