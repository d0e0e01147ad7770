"""A checkpoint folder of one kind into one of the other, a parameter at a time; and what loading a folder would take.

Works on host memory, which holds what is being written and no more. Must not know files' formats or names.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from kimi_jax import hf_config, strict_json
from kimi_jax.checkpoints import folders
from kimi_jax.checkpoints.contents import Contents
from kimi_jax.checkpoints.hub_write import export_params
from kimi_jax.checkpoints.report import LoadReport, peak_resident
from kimi_jax.checkpoints.save_write import save_params
from kimi_jax.config import Config
from kimi_jax.runtime import Model
from sharding_rules import SINGLE, Layout


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str | None = None,
    dtype: str | None = None,
    layout: Layout | None = None,
    shard_size: str | int = "5GB",
    progress: bool = True,
) -> LoadReport:
    """Write the checkpoint `src` to `dst`, hub safetensors as an orbax save or the other way round -> what was read.

    to: "orbax" or "safetensors", default the kind that `src` is not. dtype: "float32" or "bfloat16", default as
    config.json says; packed experts and what else the hub keeps in its own dtype stay bit for bit. layout: an orbax
    save is cut as the ranks of this layout hold it, one file a shard, so that each of them reads whole files; by
    default one file a parameter. Every layout loads either. It takes as many host devices as it has ranks (see
    `simulate_devices`). shard_size: of safetensors files, as in `export_safetensors`.

    On the host there are at most the two parameters that are being written. `dst` appears when it is complete; an
    orbax save takes the place of the one before.

    Raises ValueError, before anything is written, for what `load` refuses, and for a `dst` that holds other things.
    """
    begin, to = time.perf_counter(), to or _other(folders.kind_of(src))
    if to not in folders.KINDS:
        raise ValueError(f"to={to!r}: {' or '.join(map(repr, folders.KINDS))} was wanted")
    if layout is not None and to != "orbax":
        raise ValueError("layout: safetensors are not cut for a layout; leave it out, any layout loads them")
    source, model = _described(src, layout, dtype, jax.devices("cpu"))
    params, report = folders.open_params(source, model.config, model.abstract(), model.shardings())
    hub, config = strict_json.read_object(source / "config.json"), model.config
    if str(model.dtype) != config.dtype:
        hub = hf_config.with_dtype(hub, str(model.dtype))
        config = dataclasses.replace(config, dtype=str(model.dtype))
    contents = Contents(config, params, hub, report.padding, source)
    if to == "orbax":
        save_params(dst, contents, progress=progress)
    else:
        export_params(dst, contents, shard_size=shard_size, progress=progress)
    report.done, report.seconds, report.peak_resident = "converted", time.perf_counter() - begin, peak_resident()
    return report


def dry_run(
    path: str | Path,
    *,
    layout: Layout | None = None,
    dtype: str | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> folders.DryRun:
    """What `load` would do with a folder, from the headers alone: bytes that each device would read, or the names of
    what is missing, unexpected or misshapen. `.ok` says whether it would load.

    Raises ValueError for a folder that cannot be made sense of, and for a layout that does not fit the model.
    """
    source, model = _described(path, layout, dtype, devices)
    return folders.dry_run(source, model.config, model.abstract(), model.shardings())


def _described(
    path: str | Path, layout: Layout | None, dtype: str | None, devices: Sequence[jax.Device] | None
) -> tuple[Path, Model]:
    """Where a checkpoint is, and its model without parameters."""
    source = folders.locate(path)
    config = Config.from_hf(source)
    return source, Model(config, layout or SINGLE, dtype or config.dtype, devices)


def _other(kind: str) -> str:
    (other,) = folders.KINDS.keys() - {kind}
    return other
