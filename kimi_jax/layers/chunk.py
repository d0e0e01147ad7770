"""`Chunk`: where the tokens of one call stand in their sequences."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunk:
    """A call feeds tokens [B, T], right-padded: row b holds `starts[b]` tokens already and `counts[b]` of the T are
    real.

    A row with count 0 rests: nothing of its state changes.
    """

    starts: Int[Array, " B"]
    counts: Int[Array, " B"]

    def live(self, length: int) -> Bool[Array, "B T"]:
        """Which of `length` fed positions are real."""
        return jnp.arange(length, dtype=jnp.int32)[None] < self.counts[:, None]
