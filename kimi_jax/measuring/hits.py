"""Which experts a step really reaches: the step, run once more beside the clock for its routing. Times nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.compiled import Compiled
from kimi_jax.layers.chunk import Chunk
from kimi_jax.layers.kda import DeltaState
from kimi_jax.layers.moe import MoE
from kimi_jax.model import Transformer
from kimi_jax.ops.routing import route
from kimi_jax.runtime import Model
from kimi_jax.state import Cache, State, cache_shardings
from kimi_jax.steps import overhear
from sharding_rules import axes


@dataclass(frozen=True)
class Hits:
    """Different experts that a step reached, mean of the MoE layers: of all, and of those on the fullest rank (a layer
    is done when its fullest rank is).
    """

    all: float
    fullest: float


class Routing:
    """Counts experts for a model: a step of its own, compiled beside those that are timed."""

    def __init__(self, model: Model):
        self.model = model
        self.layers = sum(model.config.is_moe(i) for i in range(model.config.num_hidden_layers))  # that route
        placed = cache_shardings(model.config, model.layout, model.mesh)
        whole = model.layout.sharding(model.mesh)
        self._reach = Compiled(model.graph, model.layout, model.mesh, reach, out=(whole, placed), donate=("cache",))

    def compile(self, batch: int, length: int, cache: Cache) -> None:
        """Ahead of time, for tokens [batch, length] and a cache of these shapes."""
        tokens, counts = np.zeros((batch, length), np.int32), np.zeros(batch, np.int32)
        self._reach.compile(self.model.params, tokens, counts, cache)

    def __call__(self, tokens: np.ndarray, state: State) -> tuple[Bool[np.ndarray, "M E"], State]:
        """What feeding tokens [B, T] to a state would reach, and the state as it was (the one given is consumed)."""
        tokens, lengths = np.asarray(tokens, np.int32), state.lengths
        counts = np.full(len(tokens), tokens.shape[1], np.int32)
        hit, cache = self._reach(self.model.params, tokens, counts, state.take())
        return np.asarray(hit), State(cache, self.model.config, self.model.layout, self.model.mesh, lengths)


def reach(
    decoder: Transformer, tokens: Int[Array, "B T"], counts: Int[Array, " B"], cache: Cache
) -> tuple[Bool[Array, "M E"], Cache]:
    """Whether each expert of each MoE layer is reached by the fed tokens; and the cache as it was.

    Of the new cache only the latent rows are kept: they lie behind the lengths, where the next step writes the same.
    """
    heard = overhear(decoder, _chosen)
    chunk = Chunk(cache.lengths, counts)
    walked = list(decoder.walk(decoder.enter(tokens, chunk), chunk, cache.layers))
    layers = tuple(
        old if isinstance(old, DeltaState) else new for old, (_, new) in zip(cache.layers, walked, strict=True)
    )
    return jnp.stack(heard), replace(cache, layers=layers)


def counted(hits: Sequence[Bool[np.ndarray, "M E"]], model: Model, *, rank: int | None = None) -> Hits:
    """The mean over some steps and all MoE layers. rank: whose experts count as the fullest; None: those that are."""
    hit = np.concatenate(hits)
    ranks = hit.reshape(len(hit), model.layout.shards(axes.EXPERTS), -1).sum(-1)
    fullest = ranks.max(-1) if rank is None else ranks[:, rank]
    return Hits(float(hit.sum(-1).mean()), float(fullest.mean()))


def here(hits: Hits | None) -> float:
    """Experts a layer whose weights a device reads."""
    return hits.fullest if hits else 0.0


def _chosen(moe: MoE, x: Float[Array, "B T D"]) -> Bool[Array, "E"]:
    tokens, k = x.reshape(-1, x.shape[-1]), moe.config.num_experts_per_token
    chosen, _ = route(tokens, moe.router[...], moe.router_bias[...], top_k=k, renormalize=False, scale=1.0)
    return jnp.zeros(moe.config.num_experts, bool).at[chosen.reshape(-1)].set(True)
