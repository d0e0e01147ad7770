"""What the model declares, and what a layout makes of it, in names and bytes. Makes no array."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax.config import Config
from kimi_jax.model import Parameter, build
from sharding_rules import SINGLE, Layout, axes, helix


def declared(config: Config, layout: Layout, dtype: str) -> list[tuple[tuple, Parameter]]:
    """Every parameter of the model with its path, such as ("layers", 0, "attention", "qkv")."""
    # Shapes depend on the layout only where heads are padded; a search over layouts need not build each time.
    return _declared(config, layout if layout.pad_heads else SINGLE, dtype)


def held(layout: Layout, array: Any, names: tuple[str | None, ...]) -> int:
    """Bytes which one device holds of something with a shape, a dtype and these logical axes."""
    return math.prod(layout.shard_shape(array.shape, *names)) * jnp.dtype(array.dtype).itemsize


def weight_bytes(config: Config, layout: Layout, dtype: str) -> int:
    """Bytes of parameters that one device holds."""
    return sum(held(layout, parameter, parameter.axes) for _, parameter in declared(config, layout, dtype))


def describe(layout: Layout) -> str:
    """A layout in a few words: "tp=2 x cp=4 = 8 ranks, shard_qkv_a", and each rule that is not helix's."""
    usual = helix(layout.tp, layout.cp, shard_qkv_a=bool(layout.mesh_axes(axes.QKV_A)))
    words = [f"tp={layout.tp} x cp={layout.cp} = {layout.ranks} rank{'s' if layout.ranks > 1 else ''}"]
    words += ["shard_qkv_a"] if layout.mesh_axes(axes.QKV_A) else []
    words += ["pad_heads"] if layout.pad_heads else []
    edited = [rule for rule, standard in zip(layout.rules, usual.rules, strict=True) if rule != standard]
    return "; ".join([", ".join(words), *(f"{axis}: {', '.join(to) or 'replicated'}" for axis, to in edited)])


def kind(path: tuple, config: Config) -> str:
    """ "kda.qkv" for ("layers", 0, "attention", "qkv"): the kind of block in place of the layer's number."""
    if path[0] != "layers":
        return ".".join(map(str, path))
    _, layer, block, *rest = path
    if block == "attention":
        first = "mla" if config.is_mla(layer) else "kda"
    elif block == "ffn":
        first = "moe" if config.is_moe(layer) else "dense"
    else:
        first, rest = "layer", [block, *rest]
    return ".".join([first, *map(str, rest)])


def order(name: str) -> int:
    """The embedding first, then layers by kind of block, then the final norm and the head."""
    first = name.split(".")[0]
    kinds = ("embed", "layer", "kda", "mla", "dense", "moe")
    return kinds.index(first) if first in kinds else len(kinds)


def layout_json(layout: Layout) -> dict[str, Any]:
    """A layout as values that json can write."""
    return {**dataclasses.asdict(layout), "rules": {name: list(to) for name, to in layout.rules}}


@functools.lru_cache(maxsize=4)
def _declared(config: Config, layout: Layout, dtype: str) -> list[tuple[tuple, Parameter]]:
    tree = build(config, layout, jnp.dtype(dtype))[1]
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Parameter))
    return [(tuple(key.key for key in path), parameter) for path, parameter in leaves]
