"""Models made: loaded from a checkpoint or drawn at random, born sharded; and written back.

Nothing is allocated before the configuration, the layout and the room on the devices have been checked.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

from kimi_jax import strict_json
from kimi_jax.checkpoints import folders
from kimi_jax.checkpoints.contents import Contents
from kimi_jax.checkpoints.hub_write import export_params
from kimi_jax.checkpoints.save_write import Saving, save_params
from kimi_jax.checkpoints.states import read_state
from kimi_jax.compiled import born
from kimi_jax.config import ASSETS, Config
from kimi_jax.initialise import draw, key_of
from kimi_jax.model import DTYPES, Parameter, build, sizes
from kimi_jax.ops.mxfp4 import dequantise
from kimi_jax.placement import weight_bytes
from kimi_jax.processes import agree, alone
from kimi_jax.runtime import Model
from kimi_jax.state import State
from kimi_jax.tables import human
from kimi_jax.tokenizer import load_tokenizer
from sharding_rules import SINGLE, Layout, valid_meshes

SHIPPED = ASSETS / "kimi-linear-tiny"
GENERATION = "generation_config.json"


def load(
    path: str | Path | None = None,
    *,
    layout: Layout | None = None,
    dtype: str | None = None,
    experts: str | None = None,
    devices: Sequence[jax.Device] | None = None,
    progress: bool = True,
) -> Model:
    """Load a checkpoint folder, of Hugging Face safetensors or of `save`, onto a layout.

    path: None is the small trained checkpoint that ships in the package. layout: None is one device. dtype: of weights
    and activations, None as the checkpoint says. experts: "bfloat16" or "float32" widens packed experts, which stay
    packed otherwise. devices: default JAX's first tp * cp. Each device reads only what it holds; `model.report` says
    how it went.

    Raises ValueError naming what is wrong: the configuration, the folder's tensors, a size that the layout does not
    divide, too few devices, weights that do not fit.
    """
    path = SHIPPED if path is None else path
    if not alone():
        agree("load", checkpoint=folders.fingerprint(path), layout=layout, dtype=dtype, experts=experts)
    source = folders.locate(path)
    config = Config.from_hf(source)
    if experts is not None and not config.packed_experts:
        raise ValueError(
            f"experts={experts!r} widens packed experts, but those of {source} are not packed; leave it out"
        )
    if experts is not None and experts not in DTYPES:
        raise ValueError(f"experts={experts!r}: {' or '.join(map(repr, DTYPES))} was wanted")
    ends = eos_token_ids(source, config)
    model = Model(config, layout or SINGLE, dtype or config.dtype, devices, load_tokenizer(source))
    check_room(model)
    model.source, model.eos_token_ids = source, ends
    model.params, model.report = folders.load_params(
        source, config, model.abstract(), model.shardings(), progress=progress
    )
    return model if experts is None else _with_wide_experts(model, jnp.dtype(experts))


def eos_token_ids(folder: Path, config: Config) -> tuple[int, ...]:
    """The ids that end a row: those of generation_config.json, or if it names none of config.json."""
    file = folder / GENERATION
    said = strict_json.read_object(file).get("eos_token_id") if file.is_file() else None
    if said is None:
        return config.eos_token_ids
    ids = said if isinstance(said, list) else [said]
    if not all(type(i) is int and 0 <= i < config.vocab_size for i in ids):
        raise ValueError(f"{file}: eos_token_id={said!r}: ids from 0 to {config.vocab_size - 1} were wanted")
    return tuple(ids)


def save(model: Model, path: str | Path, *, progress: bool = True, wait: bool = True) -> Saving:
    """Save the parameters with orbax, layout-free: `load` puts them onto any other layout.

    A save is whole or not there: killed at any moment it leaves the one before. wait: False returns while files are
    being written; call `.wait()` on the result before the parameters or the program go.
    """
    return save_params(path, _contents(model), progress=progress, wait=wait)


def export_safetensors(
    model: Model, path: str | Path, *, shard_size: str | int = "5GB", progress: bool = True
) -> list[Path]:
    """Write the parameters as the hub has them, names, dtypes and tokenizer files included -> the weight files.

    Raises ValueError if the folder exists and is not empty.
    """
    return export_params(path, _contents(model), shard_size=shard_size, progress=progress)


def _contents(model: Model) -> Contents:
    padding = {} if model.report is None else model.report.padding
    return Contents(model.config, model.params, padding=padding, source=model.source)


def load_state(model: Model, path: str | Path) -> State:
    """Read a state that `save_state` wrote onto the layout of a model, whichever one it was saved from.

    Raises ValueError if the folder holds none, or one of another model or dtype.
    """
    return read_state(path, model.config, model.layout, model.mesh, model.dtype)


def random_model(
    config: Config,
    *,
    layout: Layout | None = None,
    dtype: str | None = None,
    seed: int = 0,
    devices: Sequence[jax.Device] | None = None,
) -> Model:
    """A model of random weights, born sharded; `seed` gives the same values under every layout."""
    agree("random_model", config=config, layout=layout, dtype=dtype, seed=seed)
    model = Model(config, layout or SINGLE, dtype or config.dtype, devices)
    check_room(model)
    unpadded = build(config, dataclasses.replace(model.layout, pad_heads=False), model.dtype)[1]

    def one(path: tuple, parameter: Parameter, held: Parameter, sharding: Sharding) -> Array:
        return born(_draw_padded, (parameter, held.shape), sharding, key_of(tuple(k.key for k in path), seed))

    model.params = jax.tree_util.tree_map_with_path(
        one, unpadded, model.declared, model.shardings(), is_leaf=lambda x: isinstance(x, Parameter)
    )
    return model


def _draw_padded(about: tuple[Parameter, tuple[int, ...]], key: Array) -> Array:
    parameter, shape = about
    value = draw(parameter, key)
    return jnp.pad(value, [(0, to - have) for to, have in zip(shape, value.shape, strict=True)])


def _with_wide_experts(model: Model, dtype: np.dtype) -> Model:
    """The same model with its packed experts widened, a layer at a time, each shard where it lies."""
    wide = Model(
        dataclasses.replace(model.config, packed_experts=False),
        model.layout,
        str(model.dtype),
        list(model.mesh.devices.flat),
        model.tokenizer,
    )
    wide.source, wide.report, wide.params = model.source, model.report, model.params
    wide.eos_token_ids = model.eos_token_ids
    placed = wide.shardings()
    for index, layer in wide.params["layers"].items():
        for name in [name.removesuffix("_packed") for name in layer["ffn"] if name.endswith("_packed")]:
            packed, scale = layer["ffn"].pop(f"{name}_packed"), layer["ffn"].pop(f"{name}_scale")
            layer["ffn"][name] = born(_widen, dtype, placed["layers"][index]["ffn"][name], packed, scale)
    return wide


def _widen(dtype: np.dtype, packed: Array, scale: Array) -> Array:
    return dequantise(packed, scale, dtype)


def check_room(model: Model, limit: int | None = None) -> None:
    """Raise ValueError, before anything is allocated, if the weights cannot fit a device, naming the layouts on which
    they would.

    limit: bytes a device has; default what the devices say (host devices say nothing, and are not checked).
    """
    stats = [device.memory_stats() or {} for device in model.mesh.local_devices]
    limits = [s["bytes_limit"] for s in stats if "bytes_limit" in s] if limit is None else [limit]

    def need(layout: Layout) -> int:
        return weight_bytes(model.config, layout, str(model.dtype))

    if not limits or need(model.layout) <= min(limits):
        return
    meshes = valid_meshes(model.layout, sizes(model.config, model.layout), 64)
    ranks = sorted({tp * cp for tp, cp in meshes if need(model.layout.resized(tp, cp)) <= min(limits)})
    raise ValueError(
        f"the weights need {human(need(model.layout))} on each of {model.layout.ranks} devices, which have "
        f"{human(min(limits))}; they would fit tp * cp in {{{', '.join(map(str, ranks))}}} (up to 64 ranks)"
    )
