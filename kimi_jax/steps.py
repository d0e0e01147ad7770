"""The steps of a model, to be compiled: pure functions of the decoder and arrays. They know neither jit nor users."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.layers.chunk import Chunk
from kimi_jax.layers.moe import MoE
from kimi_jax.model import Transformer
from kimi_jax.sampling import Sampling, row_keys, token_logprobs
from kimi_jax.state import Cache

BURST = 64  # tokens a row that one run of the decode loop can draw


def logits(
    decoder: Transformer, tokens: Int[Array, "B T"], counts: Int[Array, " B"], cache: Cache
) -> Float[Array, "B T W"]:
    """Logits after each fed token."""
    hidden, _ = decoder(tokens, Chunk(cache.lengths, counts), cache.layers)
    return decoder.head(hidden)


def extend(decoder: Transformer, tokens: Int[Array, "B T"], counts: Int[Array, " B"], cache: Cache):
    """Feed tokens -> logits after each row's last real one, cache. A resting row's logits mean nothing."""
    hidden, layers = decoder(tokens, Chunk(cache.lengths, counts), cache.layers)
    last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    return decoder.head(last)[:, 0], Cache(layers, cache.lengths + counts)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Observed:
    """What happens inside on the way to the logits [B, T, W].

    hidden [1 + L, B, T, D]: the residual stream as it enters, then behind each layer. margins [M, B, T]: for each MoE
    layer, how near the tokens are to another expert (`ops.routing.margins`).
    """

    logits: Any
    hidden: Any
    margins: Any


def observe(
    decoder: Transformer, tokens: Int[Array, "B T"], counts: Int[Array, " B"], cache: Cache
) -> tuple[Observed, Cache]:
    """Feed tokens as `extend` does, and look on."""
    heard = overhear(decoder, MoE.margins)
    chunk = Chunk(cache.lengths, counts)
    entered = decoder.enter(tokens, chunk)
    streams, layers = zip(*decoder.walk(entered, chunk, cache.layers), strict=True)
    hidden = jnp.stack([stream.h for stream in (entered, *streams)])
    margins = jnp.stack(heard) if heard else jnp.zeros((0, *tokens.shape))
    return Observed(decoder.head(decoder.finish(streams[-1])), hidden, margins), Cache(layers, cache.lengths + counts)


def overhear(decoder: Transformer, listen: Callable[[MoE, Array], Array]) -> list[Array]:
    """Let listen(moe, its input) run before each MoE of a step's own copy of the modules -> where its answers will be,
    in the order of the layers.
    """
    heard: list[Array] = []
    run = decoder.layers[0].run

    def listening(module: nnx.Module, x: Array, *args: Any) -> Any:
        if isinstance(module, MoE):
            heard.append(listen(module, x))
        return run(module, x, *args)

    decoder.run_blocks(listening)
    return heard


def choose(
    decoder: Transformer, rows: Bool[Array, " B"], yes: Float[Array, "B W"], no: Float[Array, "B W"]
) -> Float[Array, "B W"]:
    """yes[b] where rows[b], else no[b]."""
    del decoder
    return jnp.where(rows[:, None], yes, no)


def draw(
    decoder: Transformer,
    logits: Float[Array, "B W"],
    sampling: Sampling,
    seeds: Array,
    drawn: Int[Array, ""],
    *,
    want_logprobs: bool,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, " B"]]:
    """One token a row, its log probability (0 unless wanted) and whether the row's logits were all finite."""
    del decoder
    tokens = sampling(logits, row_keys(seeds, drawn))
    logprobs = token_logprobs(logits, tokens) if want_logprobs else jnp.zeros(tokens.shape)
    return tokens, logprobs, jnp.isfinite(logits).all(-1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Burst:
    """What a run of the decode loop leaves: `steps` columns of tokens and logprobs [B, BURST] (-1 where a row rested).

    token [B]: drawn last and not fed. live [B]: rows that go on. finite [B]: False where logits were not.
    """

    tokens: Any
    logprobs: Any
    token: Any
    live: Any
    finite: Any
    steps: Any


def burst(
    decoder: Transformer,
    cache: Cache,
    token: Int[Array, " B"],
    live: Bool[Array, " B"],
    sampling: Sampling,
    seeds: Array,
    drawn: Int[Array, ""],
    stops: Int[Array, " n"],
    steps: Int[Array, ""],
    *,
    want_logprobs: bool,
) -> tuple[Cache, Burst]:
    """Up to `steps` times: feed each live row its last token and draw the next; a row that draws one of `stops` rests.

    drawn: tokens drawn so far, which with a row's seed makes its key. Ends early when all rest or logits are not
    finite.
    """
    blank = jnp.full((token.shape[0], BURST), -1, jnp.int32)
    start = Burst(blank, jnp.zeros(blank.shape), token, live, jnp.ones(live.shape, bool), jnp.int32(0))

    def unfinished(carry: tuple[Cache, Burst]) -> Bool[Array, ""]:
        _, b = carry
        return (b.steps < steps) & b.live.any() & b.finite.all()

    def step(carry: tuple[Cache, Burst]) -> tuple[Cache, Burst]:
        cache, b = carry
        logits, cache = extend(decoder, b.token[:, None], b.live.astype(jnp.int32), cache)
        new, logprobs, finite = draw(decoder, logits, sampling, seeds, drawn + b.steps, want_logprobs=want_logprobs)
        new = jnp.where(b.live, new, b.token)
        out = b.tokens.at[:, b.steps].set(jnp.where(b.live, new, -1))
        return cache, Burst(
            out,
            b.logprobs.at[:, b.steps].set(logprobs),
            new,
            b.live & ~(new[:, None] == stops[None, :]).any(-1),
            finite | ~b.live,
            b.steps + 1,
        )

    return jax.lax.while_loop(unfinished, step, (cache, start))
