"""`Model`: parameters on their devices and the compiled steps. jit lives here and nowhere else.

Steps are compiled once for each shape and kept with the model; the parameters are passed as a pure dict, the layout is
closed over. Inputs that come from a user are checked in `generate` and at the top of each public method.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.checkpoints.safetensors import load_params
from kimi_jax.config import ASSETS, Config
from kimi_jax.initialise import draw, key_of
from kimi_jax.layers.chunk import Chunk
from kimi_jax.model import Parameter, build, guard
from kimi_jax.sampling import Sampling, row_keys, token_logprobs
from kimi_jax.state import Cache, State, cache_shapes, cache_shardings, new_cache
from kimi_jax.tokenizer import Tokenizer, load_tokenizer
from sharding_rules import SINGLE, Layout

BURST = 64  # tokens a row that one call of the decode loop can draw
SHIPPED = ASSETS / "kimi-linear-tiny"


def load(
    path: str | PathLike[str] | None = None,
    *,
    layout: Layout | None = None,
    dtype: str | None = None,
    devices: Sequence[jax.Device] | None = None,
    progress: bool = True,
) -> "Model":
    """Load a checkpoint folder (Hugging Face safetensors) onto a layout.

    path: None is the small trained checkpoint that ships in the package. layout: None is one device. dtype: of weights and
    activations, None as the checkpoint says. devices: default JAX's first tp * cp. Each device reads only what it holds.

    Raises ValueError naming what is wrong: the configuration, the folder's tensors, a size that the layout does not divide,
    too few devices.
    """
    path = SHIPPED if path is None else path
    config = Config.from_hf(path)
    model = Model(config, layout or SINGLE, dtype or config.dtype, devices, load_tokenizer(path))
    model.params, model.report = load_params(path, config, model.abstract(), model.shardings(), progress=progress)
    return model


def random_model(
    config: Config,
    *,
    layout: Layout | None = None,
    dtype: str | None = None,
    seed: int = 0,
    devices: Sequence[jax.Device] | None = None,
) -> "Model":
    """A model of random weights, born sharded; `seed` gives the same values under every layout."""
    model = Model(config, layout or SINGLE, dtype or config.dtype, devices)
    whole = build(config, dataclasses.replace(model.layout, pad_heads=False), model.dtype)[1]
    placed = model.shardings()

    @partial(jax.jit, static_argnums=(0, 1, 2))
    def born(parameter: Parameter, shape: tuple[int, ...], sharding: Any, key: Array) -> Array:
        value = draw(parameter, key)
        value = jnp.pad(value, [(0, to - have) for to, have in zip(shape, value.shape, strict=True)])
        return jax.lax.with_sharding_constraint(value, sharding)

    def one(path: tuple, parameter: Parameter, held: Parameter, sharding: Any) -> Array:
        return born(parameter, held.shape, sharding, key_of(tuple(k.key for k in path), seed))

    is_leaf = lambda x: isinstance(x, Parameter)  # noqa: E731
    model.params = jax.tree_util.tree_map_with_path(one, whole, model.declared, placed, is_leaf=is_leaf)
    return model


class Model:
    """A model on its devices.

    config, layout, mesh, dtype, tokenizer (None if the checkpoint has none) describe it; `logits`, `new_state`, `prefill`
    and `decode` are the steps that `generate` is made of.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        dtype: str,
        devices: Sequence[jax.Device] | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={dtype!r}: 'float32' or 'bfloat16' was wanted")
        guard(config, layout, len(jax.devices() if devices is None else devices))
        self.config, self.layout, self.tokenizer = config, layout, tokenizer
        self.dtype = jnp.dtype(dtype)
        self.mesh: Mesh = layout.mesh(devices)
        self.graph, self.declared = build(config, layout, self.dtype)
        self.params: Any = None
        self.eos_token_ids: tuple[int, ...] = config.eos_token_ids
        self.report: Any = None

        placed = cache_shardings(config, layout, self.mesh)
        whole = layout.sharding(self.mesh)
        compiled = partial(Compiled, self)
        self._logits = compiled(_logits, out=whole)
        self._extend = compiled(_extend, out=(whole, placed), donate=("cache",))
        self._choose = compiled(_choose, out=whole)
        self._draw = compiled(_draw, out=whole, static=("want_logprobs",))
        self._burst = compiled(_burst, out=(placed, whole), donate=("cache",), static=("want_logprobs",))

    def abstract(self) -> Any:
        """Shape and dtype of every parameter, in their structure."""
        return self._per_parameter(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype))

    def shardings(self) -> Any:
        """Where every parameter lives, in their structure."""
        return self._per_parameter(lambda p: self.layout.sharding(self.mesh, *p.axes))

    def logits(self, tokens: ArrayLike | Sequence, lengths: ArrayLike | Sequence[int] | None = None) -> Float[Array, "B T W"]:
        """Logits [B, T, W] in float32 after each token of whole sequences; rows may be right-padded to `lengths`."""
        tokens = self._tokens(tokens)
        counts = self._counts(tokens, lengths)
        return self._logits(tokens, counts, self._empty_cache(tokens.shape[0], tokens.shape[1]))

    def new_state(self, batch: int, capacity: int) -> State:
        """An empty state for `batch` sequences of up to `capacity` tokens (rounded up to whole stripes)."""
        for name, value in (("batch", batch), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"{name}={value}: at least 1 is wanted")
        cache = self._empty_cache(batch, capacity)
        return State(cache, self.config, self.layout, self.mesh, np.zeros(batch, np.int32))

    def prefill(self, tokens: ArrayLike | Sequence, lengths: ArrayLike | Sequence[int] | None, state: State) -> tuple[Float[Array, "B W"], State]:
        """Append tokens [B, T] (row b's first `lengths[b]`) to the state -> logits after each row's last one, new state.

        The state given is consumed. Raises ValueError if it was consumed before, belongs to another layout, or is too small.
        """
        tokens = self._tokens(tokens)
        counts = self._counts(tokens, lengths)
        if state.layout != self.layout:
            raise ValueError("state was made for another layout; move it with state.to(model.layout)")
        if len(tokens) != state.batch:
            raise ValueError(f"tokens has {len(tokens)} rows, but the state holds {state.batch}")
        after = state.lengths + np.asarray(counts)
        if after.max() > state.capacity:
            raise ValueError(
                f"capacity={state.capacity} is too small: row {int(after.argmax())} would hold {after.max()} tokens; make "
                f"the state with new_state(batch, capacity={after.max()}) or more"
            )
        logits, cache = self._extend(tokens, counts, state.take())
        return logits, State(cache, self.config, self.layout, self.mesh, after)

    def decode(self, tokens: ArrayLike | Sequence, state: State) -> tuple[Float[Array, "B W"], State]:
        """Append one token a row, tokens [B] -> logits [B, W] after it, new state. The state given is consumed."""
        return self.prefill(np.asarray(tokens)[:, None], None, state)

    def draw(self, logits: Array, sampling: Sampling, seeds: np.ndarray, drawn: int, *, want_logprobs: bool = False):
        """A token for each row of logits [B, W] -> tokens, log probabilities, whether the logits were finite, all [B]."""
        return self._draw(logits, sampling, seeds, np.int32(drawn), want_logprobs=want_logprobs)

    def choose(self, rows: np.ndarray, yes: Array, no: Array) -> Array:
        """yes[b] where rows[b], else no[b]."""
        return self._choose(rows, yes, no)

    def burst(
        self,
        state: State,
        token: np.ndarray,
        live: np.ndarray,
        sampling: Sampling,
        seeds: np.ndarray,
        drawn: int,
        stops: np.ndarray,
        steps: int,
        *,
        want_logprobs: bool = False,
    ) -> tuple[State, "Burst"]:
        """Up to `steps` decode steps on the device, see `_burst` -> new state, and the Burst as numpy arrays."""
        before = state.lengths
        cache, burst = self._burst(
            state.take(),
            token,
            live,
            sampling,
            seeds,
            np.int32(drawn),
            stops,
            np.int32(steps),
            want_logprobs=want_logprobs,
        )
        burst = jax.tree.map(np.asarray, burst)
        fed = (burst.tokens != -1).sum(-1)
        return State(cache, self.config, self.layout, self.mesh, before + fed), burst

    def warm_up(self, batch: int, capacity: int, buckets: Sequence[int] = ()) -> None:
        """Compile, ahead of time and without running anything, what `generate` needs for this batch and capacity.

        buckets: padded prompt lengths to compile prefill for; decode is always compiled.
        """
        cache = cache_shapes(self.config, self.layout, batch, capacity, self.dtype)
        for length in sorted({1, *buckets}):
            tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
            self._extend.compile(tokens, jax.ShapeDtypeStruct((batch,), jnp.int32), cache)

    def _per_parameter(self, f: Callable[[Parameter], Any]) -> Any:
        return jax.tree.map(f, self.declared, is_leaf=lambda x: isinstance(x, Parameter))

    def _empty_cache(self, batch: int, capacity: int) -> Cache:
        return new_cache(self.config, self.layout, self.mesh, batch, capacity, self.dtype)

    def _tokens(self, tokens: ArrayLike | Sequence) -> np.ndarray:
        array = np.asarray(tokens)
        if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iu":
            raise ValueError(
                f"tokens has shape {array.shape} and dtype {array.dtype}: whole numbers [batch, length] are wanted"
            )
        if array.min() < 0 or array.max() >= self.config.vocab_size:
            raise ValueError(
                f"tokens holds ids from {array.min()} to {array.max()}; the vocabulary has 0 to {self.config.vocab_size - 1}"
            )
        return array.astype(np.int32)

    def _counts(self, tokens: np.ndarray, lengths: ArrayLike | Sequence[int] | None) -> np.ndarray:
        batch, length = tokens.shape
        counts = np.full(batch, length, np.int32) if lengths is None else np.asarray(lengths, np.int32)
        if counts.shape != (batch,) or counts.min() < 0 or counts.max() > length:
            raise ValueError(
                f"lengths={counts.tolist()}: one number from 0 to {length} for each of {batch} rows is wanted"
            )
        return counts


class Compiled:
    """One step of a model, compiled once for each shape of its arguments and kept: nothing is traced twice."""

    def __init__(
        self, model: Model, step: Callable, *, out: Any, donate: Sequence[str] = (), static: Sequence[str] = ()
    ):
        def run(params: Any, *args: Any, **kwargs: Any):
            with jax.default_matmul_precision("highest"):  # of float32 products; those of bfloat16 are exact anyway
                return step(nnx.merge(model.graph, params), *args, **kwargs)

        self.model = model
        self.executables: dict[Any, Any] = {}
        names = list(inspect.signature(step).parameters)  # the first is the module, made from the parameters
        self._jit = jax.jit(
            run,
            donate_argnums=tuple(names.index(name) for name in donate),
            static_argnames=static,
            out_shardings=out,
        )

    def __call__(self, *args: Any, **static: Any) -> Any:
        """Run on the model's parameters."""
        whole = self.model.layout.sharding(self.model.mesh)
        args = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x, whole), args)
        return self.compile(*args, **static)(self.model.params, *args)

    def compile(self, *args: Any, **static: Any) -> Any:
        """The executable for arguments (arrays or ShapeDtypeStructs) of these shapes; nothing runs."""
        leaves, structure = jax.tree.flatten(args)
        key = (structure, tuple((x.shape, x.dtype) for x in leaves), tuple(static.items()))
        if key not in self.executables:
            with jax.set_mesh(self.model.mesh):
                self.executables[key] = self._jit.lower(self.model.params, *args, **static).compile()
        return self.executables[key]


def _logits(model: Any, tokens: Int[Array, "B T"], counts: Int[Array, " B"], cache: Cache) -> Float[Array, "B T W"]:
    hidden, _ = model(tokens, Chunk(cache.lengths, counts), cache.layers)
    return model.head(hidden)


def _extend(model: Any, tokens: Int[Array, "B T"], counts: Int[Array, " B"], cache: Cache):
    """Feed tokens -> logits after each row's last real one, cache. A resting row's logits mean nothing."""
    hidden, layers = model(tokens, Chunk(cache.lengths, counts), cache.layers)
    last = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
    return model.head(last)[:, 0], Cache(layers, cache.lengths + counts)


def _choose(
    model: Any, rows: Bool[Array, " B"], yes: Float[Array, "B W"], no: Float[Array, "B W"]
) -> Float[Array, "B W"]:
    del model
    return jnp.where(rows[:, None], yes, no)


def _draw(
    model: Any,
    logits: Float[Array, "B W"],
    sampling: Sampling,
    seeds: Array,
    drawn: Int[Array, ""],
    *,
    want_logprobs: bool,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, " B"]]:
    """One token a row, its log probability (0 unless wanted) and whether the row's logits were all finite."""
    del model
    tokens = sampling(logits, row_keys(seeds, drawn))
    logprobs = token_logprobs(logits, tokens) if want_logprobs else jnp.zeros(tokens.shape)
    return tokens, logprobs, jnp.isfinite(logits).all(-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
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


def _burst(
    model: Any,
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

    drawn: tokens drawn so far, which with a row's seed makes its key. Ends early when all rest or logits are not finite.
    """
    blank = jnp.full((token.shape[0], BURST), -1, jnp.int32)
    start = Burst(blank, jnp.zeros(blank.shape), token, live, jnp.ones(live.shape, bool), jnp.int32(0))

    def unfinished(carry: tuple[Cache, Burst]) -> Bool[Array, ""]:
        _, b = carry
        return (b.steps < steps) & b.live.any() & b.finite.all()

    def step(carry: tuple[Cache, Burst]) -> tuple[Cache, Burst]:
        cache, b = carry
        logits, cache = _extend(model, b.token[:, None], b.live.astype(jnp.int32), cache)
        new, logprobs, finite = _draw(model, logits, sampling, seeds, drawn + b.steps, want_logprobs=want_logprobs)
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
