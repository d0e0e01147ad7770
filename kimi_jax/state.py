"""What sequences leave behind in the layers: `Cache`, which the compiled steps take and give back, and `State`, which
a user holds.

An MLA layer keeps one latent row a token, dealt out to stripes; a KDA layer a matrix a head and the last inputs of its
convolution. Shapes and placements of both come from here, for every caller.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kimi_jax import processes, tables
from kimi_jax.config import Config
from kimi_jax.layers.kda import DeltaState
from kimi_jax.layers.mla import LatentCache
from sharding_rules import DeviceMesh, Layout, stripes, whole_number


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """layers: one LatentCache or DeltaState a layer; lengths [B]: tokens each row holds."""

    layers: Any
    lengths: Any


def cache_shapes(config: Config, layout: Layout, batch: int, capacity: int, dtype: DTypeLike) -> Cache:
    """The shape of everything a batch keeps, as ShapeDtypeStructs: the one place that decides it."""
    latent = LatentCache.shape(config, layout, batch, capacity, dtype)
    delta = DeltaState.shape(config, batch, dtype)
    layers = tuple(latent if config.is_mla(i) else delta for i in range(config.num_hidden_layers))
    return Cache(layers, jax.ShapeDtypeStruct((batch,), jnp.int32))


def cache_shardings(config: Config, layout: Layout, mesh: DeviceMesh) -> Cache:
    """Where each array of a Cache lives, in the same structure."""
    latent, delta = _placed(LatentCache, layout, mesh), _placed(DeltaState, layout, mesh)
    layers = tuple(latent if config.is_mla(i) else delta for i in range(config.num_hidden_layers))
    return Cache(layers, layout.sharding(mesh))


class State:
    """What a batch of sequences holds; `prefill`, `decode` and `generate` append to it.

    A step consumes the state it is given (its buffers are donated): using that one again is an error. `fork` first.
    """

    def __init__(
        self,
        cache: Cache,
        config: Config,
        layout: Layout,
        mesh: DeviceMesh,
        lengths: np.ndarray,
        pending: np.ndarray | None = None,
    ):
        self._cache: Cache | None = cache
        self._lengths = np.asarray(lengths, np.int32)
        self.config, self.layout, self.mesh = config, layout, mesh
        self.pending = pending  # [B]: sampled last and not yet fed, if the state was kept by generate

    @property
    def cache(self) -> Cache:
        """The arrays. Raises ValueError if a step has consumed them."""
        if self._cache is None:
            raise ValueError(
                "state was consumed by an earlier step, which donated its buffers; call state.fork() before that step"
            )
        return self._cache

    def take(self) -> Cache:
        """Hand the arrays to a step that will donate them."""
        cache, self._cache = self.cache, None
        return cache

    @property
    def lengths(self) -> np.ndarray:
        """Tokens that each row holds, [B]."""
        return self._lengths.copy()

    @property
    def dtype(self) -> np.dtype:
        """Of the cached rows; KDA's matrices are float32 in any case."""
        layer = self.cache.layers[0]
        return np.dtype((layer.rows if isinstance(layer, LatentCache) else layer.conv).dtype)

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self._lengths)

    @property
    def capacity(self) -> int:
        """Tokens a row can hold: whole stripes."""
        return _capacity(self.cache)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays over all devices, replicas counted once."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))

    def fork(self, n: int = 1) -> "State":
        """A copy with each row n times in a row; this state stays usable."""
        n = whole_number("n", n)
        placed = cache_shardings(self.config, self.layout, self.mesh)
        copies = jax.tree.map(lambda x, at: jax.device_put(jnp.repeat(x, n, axis=0), at), self.cache, placed)
        # repeat(x, 1) may return x itself: the copy must own its buffers, since either may be donated.
        copies = jax.tree.map(lambda x, old: x.copy() if x is old else x, copies, self.cache)
        pending = None if self.pending is None else np.repeat(self.pending, n)
        return State(copies, self.config, self.layout, self.mesh, np.repeat(self._lengths, n), pending)

    def row(self, index: int, pending: int | None = None) -> "State":
        """A copy of one row, as a state of batch 1."""
        index = whole_number("index", index, least=0, most=self.batch - 1)
        placed = cache_shardings(self.config, self.layout, self.mesh)
        cache = jax.tree.map(lambda x, at: jax.device_put(x[index : index + 1].copy(), at), self.cache, placed)
        token = None if pending is None else np.array([pending], np.int32)
        return State(cache, self.config, self.layout, self.mesh, self._lengths[index : index + 1], token)

    def to(self, layout: Layout, devices: Any = None) -> "State":
        """A copy on another layout: positions are dealt out again by its stripes, heads by its ranks.

        devices: default those of this state, or JAX's first ones if it needs more.
        """
        own = list(self.mesh.devices.flat)
        mesh = layout.mesh(devices or (own if len(own) >= layout.ranks else processes.devices_for(layout.ranks)))
        placed = cache_shardings(self.config, layout, mesh)

        def move(layer: Any, at: Any) -> Any:
            if isinstance(layer, LatentCache):
                layer = LatentCache(_restripe(layer.rows, self.layout, layout))
            return jax.tree.map(processes.put, layer, at)

        layers = tuple(move(layer, at) for layer, at in zip(self.cache.layers, placed.layers, strict=True))
        lengths = processes.put(self._lengths, placed.lengths)
        return State(Cache(layers, lengths), self.config, layout, mesh, self._lengths, self.pending)

    def __repr__(self) -> str:
        if self._cache is None:
            return f"State(consumed, {self.batch} rows)"
        return (
            f"State({self.batch} rows, lengths={self._lengths.tolist()}, capacity={self.capacity}, "
            f"{self.bytes:,} bytes, tp={self.layout.tp}, cp={self.layout.cp})"
        )

    def _repr_html_(self) -> str:
        if self._cache is None:
            return tables.paragraph(repr(self))
        rows = [(str(i), f"{n:,}", tables.Bar(n / self.capacity)) for i, n in enumerate(self._lengths.tolist())]
        return tables.html(repr(self), ("row", "tokens held", "of its capacity"), rows)


def _placed(layer: type, layout: Layout, mesh: DeviceMesh) -> Any:
    return layer(*(layout.sharding(mesh, *f.metadata["axes"]) for f in dataclasses.fields(layer)))


def _capacity(cache: Cache) -> int:
    for layer in cache.layers:
        if isinstance(layer, LatentCache):
            return layer.rows.shape[1] * layer.rows.shape[2]
    return np.iinfo(np.int32).max  # no MLA layer: nothing grows


def _restripe(rows: jax.Array | np.ndarray, old: Layout, new: Layout) -> np.ndarray:
    """Rows [B, N, S, Z] in the old stripes -> the same positions in the new ones; the capacity rounds up to whole
    rounds.
    """
    host = processes.fetch(rows)
    tokens = host.shape[1] * host.shape[2]
    room = stripes.capacity(tokens, new.tokens_per_block, new.cp)
    out = np.zeros((host.shape[0], new.cp, room // new.cp, host.shape[3]), host.dtype)
    p = np.arange(tokens)
    was = stripes.owner(p, old.tokens_per_block, old.cp), stripes.slot(p, old.tokens_per_block, old.cp)
    now = stripes.owner(p, new.tokens_per_block, new.cp), stripes.slot(p, new.tokens_per_block, new.cp)
    out[:, now[0], now[1]] = host[:, was[0], was[1]]
    return out
