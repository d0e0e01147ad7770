"""`Model`: parameters on their devices and the steps that are compiled for them.

Inputs that come from a user are checked in `generate` and at the top of each public method.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from kimi_jax import processes, steps
from kimi_jax.checkpoints.report import LoadReport
from kimi_jax.compiled import Compiled, empty
from kimi_jax.config import Config
from kimi_jax.model import Parameter, build, checked_dtype, guard
from kimi_jax.sampling import Greedy, Sampling
from kimi_jax.state import Cache, State, cache_shapes, cache_shardings
from kimi_jax.steps import Burst, Observed
from kimi_jax.tokenizer import Tokenizer
from sharding_rules import DeviceMesh, Layout, stripes, whole_number

MOST_TOKENS = (1 << 31) - 1  # positions are int32
Rows = ArrayLike | Sequence  # numbers, one or a list a row: arrays or plain lists


class Model:
    """A model on its devices.

    config, layout, mesh, dtype, tokenizer (None if the checkpoint has none) describe it; `logits`, `new_state`,
    `prefill` and `decode` are the steps that `generate` is made of.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        dtype: DTypeLike,
        devices: Sequence[jax.Device] | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        dtype = checked_dtype(dtype)
        devices = processes.devices_for(layout.ranks) if devices is None else devices
        guard(config, layout, len(devices))
        self.config, self.layout, self.tokenizer = config, layout, tokenizer
        self.dtype = jnp.dtype(dtype)
        self.mesh: DeviceMesh = layout.mesh(devices)
        processes.check_spread(list(self.mesh.devices.flat))
        self.graph, self.declared = build(config, layout, self.dtype)
        self.params: Any = None
        self.eos_token_ids: tuple[int, ...] = config.eos_token_ids
        self.report: LoadReport | None = None
        self.source: Path | None = None  # the folder it was loaded from

        placed = cache_shardings(config, layout, self.mesh)
        whole = layout.sharding(self.mesh)
        compiled = partial(Compiled, self.graph, self.layout, self.mesh)
        self._logits = compiled(steps.logits, out=whole)
        self._extend = compiled(steps.extend, out=(whole, placed), donate=("cache",))
        self._observe = compiled(steps.observe, out=(whole, placed), donate=("cache",))
        self._choose = compiled(steps.choose, out=whole)
        self._draw = compiled(steps.draw, out=whole, static=("want_logprobs",))
        self._burst = compiled(steps.burst, out=(placed, whole), donate=("cache",), static=("want_logprobs",))

    def abstract(self) -> Any:
        """Shape and dtype of every parameter, in their structure."""
        return self._per_parameter(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype))

    def shardings(self) -> Any:
        """Where every parameter lives, in their structure."""
        return self._per_parameter(lambda p: self.layout.sharding(self.mesh, *p.axes))

    def logits(self, tokens: Rows, lengths: Rows | None = None) -> Float[Array, "B T W"]:
        """Logits [B, T, W] in float32 after each token of whole sequences; rows may be right-padded to `lengths`."""
        tokens = self._tokens(tokens)
        counts = self._counts(tokens, lengths)
        return self._logits(self.params, tokens, counts, self._empty(*tokens.shape)())

    def new_state(self, batch: int, capacity: int) -> State:
        """An empty state for `batch` sequences of up to `capacity` tokens (rounded up to whole stripes)."""
        batch, capacity = whole_number("batch", batch), whole_number("capacity", capacity, most=MOST_TOKENS)
        cache = self._empty(batch, capacity)()
        return State(cache, self.config, self.layout, self.mesh, np.zeros(batch, np.int32))

    def prefill(self, tokens: Rows, lengths: Rows | None, state: State) -> tuple[Float[Array, "B W"], State]:
        """Append tokens [B, T] (row b's first `lengths[b]`) to the state -> logits after each row's last one, new
        state.

        The state given is consumed. Raises ValueError if it was consumed before, belongs to another layout, or is too
        small.
        """
        return self._append(self._extend, tokens, lengths, state)

    def decode(self, tokens: Rows, state: State) -> tuple[Float[Array, "B W"], State]:
        """Append one token a row, tokens [B] -> logits [B, W] after it, new state. The state given is consumed."""
        tokens = np.asarray(tokens)
        if tokens.ndim != 1:
            raise ValueError(f"tokens has shape {tokens.shape}: one id a row, [batch], is wanted")
        return self.prefill(tokens[:, None], None, state)

    def observe(self, tokens: Rows, lengths: Rows | None, state: State) -> tuple[Observed, State]:
        """`prefill` that shows what happens inside: logits of every token, the residual stream behind every layer."""
        return self._append(self._observe, tokens, lengths, state)

    def compile_observe(self, batch: int, width: int, capacity: int) -> None:
        """Compile `observe`, ahead of time, for tokens [batch, width] and a state of this capacity."""
        tokens, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, width), (batch,)))
        self._observe.compile(self.params, tokens, counts, self.cache_structs(batch, capacity))

    def draw(self, logits: Array, sampling: Sampling, seeds: np.ndarray, drawn: int, *, want_logprobs: bool = False):
        """A token for each row of logits [B, W] -> tokens, log probabilities, whether the logits were finite, all
        [B].
        """
        return self._draw(self.params, logits, sampling, seeds, np.int32(drawn), want_logprobs=want_logprobs)

    def choose(self, rows: np.ndarray, yes: Array, no: Array) -> Array:
        """yes[b] where rows[b], else no[b]."""
        return self._choose(self.params, rows, yes, no)

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
    ) -> tuple[State, Burst]:
        """Up to `steps` decode steps on the device, see `steps.burst` -> new state, and the Burst as numpy arrays."""
        before = state.lengths
        cache, burst = self._burst(
            self.params,
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

    def warm_up(
        self,
        batch: int,
        capacity: int,
        buckets: Sequence[int] = (),
        *,
        sampling: Sampling = Greedy(),  # noqa: B008
    ) -> None:
        """Compile, ahead of time and without running anything, what `generate` needs for this batch and capacity.

        capacity: as given to `generate` or `new_state`. buckets: padded lengths of prompt chunks to compile for; 1
        always is. sampling: one of the kind that will be used; its numbers do not matter.
        """
        for name, value in (("batch", batch), ("capacity", capacity), *(("buckets", b) for b in buckets)):
            whole_number(name, value, most=MOST_TOKENS)
        self._empty(batch, capacity)
        cache = self.cache_structs(batch, capacity)

        def rows(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch, *shape), dtype)

        number = jax.ShapeDtypeStruct((), jnp.int32)
        stops = jax.ShapeDtypeStruct((-(-max(len(self.eos_token_ids), 1) // 8) * 8,), jnp.int32)
        for length in sorted({1, *buckets}):
            self._extend.compile(self.params, rows(jnp.int32, length), rows(jnp.int32), cache)
        logits, seeds = rows(jnp.float32, self.config.vocab_size), rows(jnp.uint32)
        self._draw.compile(self.params, logits, sampling, seeds, number, want_logprobs=False)
        token, live = rows(jnp.int32), rows(jnp.bool_)
        rest = token, live, sampling, seeds, number, stops, number
        self._burst.compile(self.params, cache, *rest, want_logprobs=False)

    def cache_structs(self, batch: int, capacity: int) -> Cache:
        """Shapes and placements of a state's arrays, with no array behind them."""
        shapes = cache_shapes(self.config, self.layout, batch, capacity, self.dtype)
        return _placed(shapes, cache_shardings(self.config, self.layout, self.mesh))

    def param_structs(self) -> Any:
        """Shapes and placements of the parameters, with no array behind them."""
        return _placed(self.abstract(), self.shardings())

    def _per_parameter(self, f: Callable[[Parameter], Any]) -> Any:
        return jax.tree.map(f, self.declared, is_leaf=lambda x: isinstance(x, Parameter))

    def _empty(self, batch: int, capacity: int) -> Callable[[], Cache]:
        rounded = stripes.capacity(capacity, self.layout.tokens_per_block, self.layout.cp)
        return empty(self.config, self.layout, self.mesh, batch, rounded, self.dtype)

    def _append(self, step: Compiled, tokens: Rows, lengths: Rows | None, state: State) -> tuple[Any, State]:
        """Check the arguments of a step that feeds tokens, and run it -> what it gives, new state."""
        tokens = self._tokens(tokens)
        counts = self._counts(tokens, lengths)
        self.check_state(state)
        if len(tokens) != state.batch:
            raise ValueError(f"tokens has {len(tokens)} rows, but the state holds {state.batch}")
        after = state.lengths + np.asarray(counts)
        if after.max() > state.capacity:
            raise ValueError(
                f"capacity={state.capacity} is too small: row {int(after.argmax())} would hold {after.max()} tokens; "
                f"make the state with new_state(batch, capacity={after.max()}) or more"
            )
        out, cache = step(self.params, tokens, counts, state.take())
        return out, State(cache, self.config, self.layout, self.mesh, after)

    def check_state(self, state: State) -> None:
        """Raise ValueError unless a state is of this model: its configuration, dtype and layout."""
        if not isinstance(state, State):
            raise ValueError(f"state={state!r}: a State, as new_state or keep_state give, is wanted")
        if state.layout != self.layout:
            raise ValueError("state was made for another layout; move it with state.to(model.layout)")
        if state.config != self.config or state.dtype != self.dtype:
            of = f"{state.dtype}, the model {self.dtype}" if state.config == self.config else "another configuration"
            raise ValueError(f"state belongs to another model ({of}): what it holds means nothing to this one")

    def _tokens(self, tokens: Rows) -> np.ndarray:
        array = np.asarray(tokens)
        if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iu":
            raise ValueError(
                f"tokens has shape {array.shape} and dtype {array.dtype}: whole numbers [batch, length] are wanted"
            )
        if array.min() < 0 or array.max() >= self.config.vocab_size:
            raise ValueError(
                f"tokens holds ids from {array.min()} to {array.max()}; "
                f"the vocabulary has 0 to {self.config.vocab_size - 1}"
            )
        return array.astype(np.int32)

    def _counts(self, tokens: np.ndarray, lengths: Rows | None) -> np.ndarray:
        batch, length = tokens.shape
        counts = np.full(batch, length, np.int32) if lengths is None else np.asarray(lengths, np.int32)
        if counts.shape != (batch,) or counts.min() < 0 or counts.max() > length:
            raise ValueError(
                f"lengths={counts.tolist()}: one number from 0 to {length} for each of {batch} rows is wanted"
            )
        return counts


def _placed(shapes: Any, places: Any) -> Any:
    return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, places)
