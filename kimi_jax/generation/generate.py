"""`generate` and `stream`: prompts in, text out, over the compiled steps of a `Model`.

The device decodes in bursts; between bursts the host looks at stop strings, progress, Ctrl-C and non-finite logits.
What a row produces depends on its prompt, its seed and the weights, never on its neighbours, the padding or the
chunking.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from kimi_jax.generation import prompting
from kimi_jax.generation.completion import Completion, Piece
from kimi_jax.generation.rows import Row
from kimi_jax.processes import agree, alone, is_first
from kimi_jax.runtime import MOST_TOKENS, Model
from kimi_jax.sampling import Greedy, Sampling, row_seeds
from kimi_jax.state import State
from kimi_jax.steps import BURST
from sharding_rules import whole_number

PREFILL_CHUNK = 2048  # longest stretch of prompt fed at once, unless asked otherwise
SMALLEST_BUCKET = 16
BURST_SECONDS = 0.1  # how long a burst should take: short enough for Ctrl-C and streaming, long against its fixed cost


def generate(
    model: Model,
    prompts: prompting.Prompt | Sequence[prompting.Prompt],
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = Greedy(),  # noqa: B008  (frozen)
    seed: int | Sequence[int] = 0,
    stop: str | Sequence[str | int] = (),
    logprobs: bool = False,
    capacity: int | None = None,
    prefill_chunk: int | None = None,
    state: State | None = None,
    keep_state: bool = False,
    progress: bool = False,
) -> list[Completion]:
    """Continue one prompt or many, of any lengths -> one Completion each.

    prompts: strings (encoded as the checkpoint's tokenizer does) or lists of token ids (taken as they are).
    seed: row i draws with `seed + i`, or with its own entry of a list. stop: token ids and strings, besides the EOS
    ids.
    capacity: tokens a row can hold, default what this call needs, rounded up to a bucket. prefill_chunk: prompt tokens
    fed at once. state: continue each of its rows, without consuming it; a kept state first feeds its last token.
    keep_state: give back what each row holds at its end. progress: a tqdm bar.

    Raises ValueError naming the argument for anything that does not fit, before anything is allocated, and
    FloatingPointError with the row and step if logits are not finite.
    """
    run = Run.prepare(model, prompts, max_new_tokens, sampling, seed, stop, logprobs, capacity, prefill_chunk, state)
    run.keep = keep_state
    bar = tqdm(total=run.max_new_tokens, unit="tok", disable=not (progress and is_first()))
    with bar:
        for steps in run.bursts():
            bar.update(steps)
    states = _split(run.state, run.token) if keep_state else [None] * len(run.rows)
    return [
        Completion(row.tokens, row.text, row.reason or "length", row.logprobs if logprobs else None, kept)
        for row, kept in zip(run.rows, states, strict=True)
    ]


def stream(
    model: Model,
    prompt: prompting.Prompt,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = Greedy(),  # noqa: B008  (frozen)
    seed: int = 0,
    stop: str | Sequence[str | int] = (),
    capacity: int | None = None,
    prefill_chunk: int | None = None,
    state: State | None = None,
) -> Iterator[Piece]:
    """The tokens of `generate` for one prompt, as they come; text in whole characters. Arguments, errors as there."""
    return _pieces(
        Run.prepare(model, [prompt], max_new_tokens, sampling, seed, stop, False, capacity, prefill_chunk, state)
    )


def _pieces(run: "Run") -> Iterator[Piece]:
    row, text_sent, tokens_sent = run.rows[0], 0, 0
    for _ in run.bursts():
        ready, tokens = row.settled()
        if len(ready or "") > text_sent or len(tokens) > tokens_sent:
            yield Piece(None if ready is None else ready[text_sent:], tokens[tokens_sent:])
            text_sent, tokens_sent = len(ready or ""), len(tokens)


@dataclass
class Run:
    """One call of generate in progress: the state on the device, the rows on the host."""

    model: Model
    prompts: list[list[int]]
    rows: list[Row]
    state: State
    max_new_tokens: int
    sampling: Sampling
    seeds: np.ndarray
    stop_tokens: np.ndarray
    stops_in_text: bool
    chunk: int
    want_logprobs: bool
    keep: bool = False
    token: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [B]: drawn last, not fed

    @classmethod
    def prepare(
        cls, model, prompts, max_new_tokens, sampling, seed, stop, logprobs, capacity, prefill_chunk, state
    ) -> "Run":
        """Check every argument, then make the state."""
        prompts = prompting.listed(prompts)
        agree(
            "generate", prompts=prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, stop=stop,
            logprobs=logprobs, capacity=capacity, prefill_chunk=prefill_chunk,
            state=None if state is None else (state.lengths, state.pending),
        )  # fmt: skip
        prompts = prompting.as_list(prompts)
        max_new_tokens = whole_number("max_new_tokens", max_new_tokens, most=MOST_TOKENS)
        if prefill_chunk is not None:
            prefill_chunk = whole_number("prefill_chunk", prefill_chunk)
        if capacity is not None:
            capacity = whole_number("capacity", capacity, most=MOST_TOKENS)
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling={sampling!r}: Greedy(), Temperature(t), TopK(k, t), TopP(p, t) or MinP(p, t)")
        if state is not None:
            model.check_state(state)
        tokens = [prompting.encode(model, prompt, i, state) for i, prompt in enumerate(prompts)]
        stop_tokens, stop_strings = prompting.stops(model, stop)
        seeds = row_seeds(seed, len(tokens))
        state = prompting.state_with_room(model, tokens, max_new_tokens, capacity, state)
        rows = [Row(model.tokenizer, set(stop_tokens.tolist()), stop_strings) for _ in tokens]
        chunk = prefill_chunk or PREFILL_CHUNK
        return cls(
            model,
            tokens,
            rows,
            state,
            max_new_tokens,
            sampling,
            seeds,
            stop_tokens,
            bool(stop_strings),
            chunk,
            logprobs,
        )

    def bursts(self) -> Iterator[int]:
        """Run to the end; yields how many steps each burst took, after the rows have taken its tokens."""
        logits, self.state = feed(self.model, self.prompts, self.state, self.chunk)
        token, logprob, finite = self.model.draw(logits, self.sampling, self.seeds, 0, want_logprobs=self.want_logprobs)
        self._take(np.asarray(token)[:, None], np.asarray(logprob)[:, None], np.asarray(finite), 0, 1)
        self.token = np.asarray(token)
        drawn, steps = 1, 1
        yield 1
        while drawn < self.max_new_tokens and any(row.reason is None for row in self.rows):
            began = time.perf_counter()
            live = np.array([row.reason is None for row in self.rows])
            room = min(steps, self.max_new_tokens - drawn, BURST)
            self.state, burst = self.model.burst(
                self.state, self.token, live, self.sampling, self.seeds, drawn, self.stop_tokens, room,
                want_logprobs=self.want_logprobs,
            )  # fmt: skip
            self.token, taken = burst.token, int(burst.steps)
            self._take(burst.tokens, burst.logprobs, burst.finite, drawn, taken)
            drawn += taken
            steps = self._next_steps(steps, time.perf_counter() - began)
            yield taken
        for row in self.rows:
            row.close()

    def _take(self, tokens, logprobs, finite, drawn: int, steps: int) -> None:
        if not finite.all():
            row = int(np.argmin(finite))
            raise FloatingPointError(
                f"logits of row {row} are not finite at new token {drawn + steps - 1}; the weights, or the state "
                "that was continued, hold NaN or overflow in this dtype"
            )
        for row, ids, logs in zip(self.rows, tokens[:, :steps].tolist(), logprobs[:, :steps].tolist(), strict=True):
            for token, log in zip(ids, logs, strict=True):
                if token != prompting.NO_TOKEN:
                    row.accept(token, log)

    def _next_steps(self, steps: int, seconds: float) -> int:
        """Twice as many while bursts are short. A kept state must end where a stop string does: one at a time then.

        Several processes have several clocks, and must run the same steps: there the time does not count.
        """
        if self.keep and self.stops_in_text:
            return 1
        if not alone():
            return min(2 * steps, BURST)
        return (
            min(2 * steps, BURST)
            if seconds < BURST_SECONDS / 2
            else max(steps // 2, 1)
            if seconds > 2 * BURST_SECONDS
            else steps
        )


def feed(model: Model, prompts: list[list[int]], state: State, chunk: int = PREFILL_CHUNK) -> tuple[Array, State]:
    """Feed all prompts, up to `chunk` tokens of each at a time -> logits after each row's last token, the new state."""
    lengths = np.array([len(p) for p in prompts])
    logits = None
    for start in range(0, int(lengths.max()), chunk):
        counts = np.clip(lengths - start, 0, chunk)
        tokens = np.zeros((len(prompts), min(bucket(int(counts.max())), chunk)), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : counts[row]] = prompt[start : start + counts[row]]
        new, state = model.prefill(tokens, counts, state)
        logits = new if logits is None else model.choose(counts > 0, new, logits)
    assert logits is not None
    return logits, state


def bucket(length: int) -> int:
    """The padded length of a prompt chunk: 1, or the next power of two from 16 on, so that few shapes are compiled."""
    return 1 if length == 1 else max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def _split(state: State, token: np.ndarray) -> list[State]:
    """One state a row, each remembering the token which it drew last and has not been fed."""
    return [state.row(i, int(token[i])) for i in range(state.batch)]
