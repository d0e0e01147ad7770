"""What a user gave `generate`, checked and turned into numbers: prompts, stops, and a state with room for them."""

from collections.abc import Sequence

import numpy as np

from kimi_jax.runtime import Model
from kimi_jax.state import State
from kimi_jax.tokenizer import StopStrings

Prompt = str | Sequence[int]
NO_TOKEN = -1


def as_list(prompts) -> list:
    """One prompt or many -> a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(prompts)
    if prompts and all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in prompts):
        return [prompts]
    if not prompts:
        raise ValueError("prompts is empty: give a string, a list of token ids, or a list of those")
    return prompts


def encode(model: Model, prompt: Prompt, index: int, pending: np.ndarray | None = None) -> list[int]:
    """Token ids to feed: the prompt's, after what a kept state has not been fed yet."""
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"prompt {index} is a string, but the checkpoint has no tokenizer; give token ids")
        ids = model.tokenizer.encode(prompt)
    else:
        ids = [int(token) for token in prompt]
    bad = [token for token in ids if not 0 <= token < model.config.vocab_size]
    if bad:
        raise ValueError(f"prompt {index} has token id {bad[0]}; the vocabulary has 0 to {model.config.vocab_size - 1}")
    if pending is not None:
        ids = [int(pending[index % len(pending)]), *ids]
    if not ids:
        raise ValueError(f"prompt {index} is empty: at least one token is needed")
    return ids


def stops(model: Model, stop: str | Sequence[str | int]) -> tuple[np.ndarray, StopStrings]:
    """Stop token ids, with the EOS ids (padded to a multiple of 8: their number compiles nothing), and strings."""
    stops = [stop] if isinstance(stop, str) else list(stop)
    strings = [s for s in stops if isinstance(s, str)]
    if strings and model.tokenizer is None:
        raise ValueError(f"stop={strings[0]!r} is a string, but the checkpoint has no tokenizer; give token ids")
    if any(not s for s in strings):
        raise ValueError("stop holds an empty string, which would end every row at once")
    ids = sorted({*model.eos_token_ids, *(int(s) for s in stops if not isinstance(s, str))})
    padded = ids + [NO_TOKEN] * (-len(ids) % 8 or (0 if ids else 8))
    return np.array(padded, np.int32), StopStrings(strings)


def state_with_room(
    model: Model, prompts: list[list[int]], max_new_tokens: int, capacity: int | None, state: State | None
) -> State:
    """A state with room for each row's prompt and new tokens: a fork of the given one, or a new one."""
    longest = max(len(p) for p in prompts)
    if state is None:
        need = longest + max_new_tokens
        if capacity is not None and capacity < need:
            raise ValueError(
                f"capacity={capacity} is too small: prompt {longest} + max_new_tokens {max_new_tokens} needs {need}"
            )
        return model.new_state(len(prompts), capacity or max(128, 1 << (need - 1).bit_length()))
    if len(prompts) != state.batch:
        raise ValueError(
            f"{len(prompts)} prompts, but the state holds {state.batch} rows; give one prompt a row, or fork(n) it"
        )
    if capacity is not None:
        raise ValueError(f"capacity={capacity} cannot be given with a state, which has its own ({state.capacity})")
    need = max(int(held) + len(p) for held, p in zip(state.lengths, prompts, strict=True)) + max_new_tokens
    if need > state.capacity:
        raise ValueError(
            f"capacity={state.capacity} of the state is too small: held + prompt + max_new_tokens needs {need}; start "
            "with a larger capacity"
        )
    return state.fork()
