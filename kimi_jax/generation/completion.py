"""What `generate` and `stream` give back. Knows neither models nor how text comes about."""

import math
from dataclasses import dataclass, field
from html import escape

from kimi_jax import tables
from kimi_jax.state import State


@dataclass(frozen=True)
class Completion:
    """What a prompt was continued with.

    tokens: new tokens only, without what ended them. text: None without a tokenizer. finish_reason: "stop" (an EOS id,
    a stop token or string) or "length". logprobs: of each token, if asked. state: what to continue from, if kept.
    """

    tokens: list[int]
    text: str | None
    finish_reason: str
    logprobs: list[float] | None = None
    state: State | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        said = f"{len(self.tokens)} tokens, ended by {self.finish_reason}"
        if self.logprobs is None:
            tokens = tables.paragraph(" ".join(map(str, self.tokens)))
        else:
            chances = [math.exp(log) for log in self.logprobs]
            rows = [(str(t), f"{p:.3f}", tables.Bar(p)) for t, p in zip(self.tokens, chances, strict=True)]
            tokens = tables.html("", ("token", "probability", ""), rows)
        words = "" if self.text is None else tables.paragraph(self.text)
        return f"{words}<details><summary>{escape(said)}</summary>{tokens}</details>"


@dataclass(frozen=True)
class Piece:
    """What came since the last piece: whole characters of text (None without a tokenizer) and the tokens behind
    them."""

    text: str | None
    tokens: list[int]
