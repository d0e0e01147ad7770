"""What a user gave `generate`, checked and turned into numbers: prompts, stops, and a state with room for them."""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from kimi_jax.runtime import Model
from kimi_jax.state import State
from kimi_jax.tokenizer import StopStrings
from sharding_rules import whole_number

Prompt = str | Sequence[int]
NO_TOKEN = -1
NO_ROW = (str, bytes, Mapping, Set)  # can be iterated over, and are no row of prompts or ids
ANY = 1 << 64  # below its negative there is no id worth a message of its own
PROMPTS = "a string, a list of token ids, or a list of those"


def listed(prompts: Any) -> Any:
    """Any row of things as a list, and what is no row as it came. Never raises: processes compare before one fails."""
    if isinstance(prompts, NO_ROW) or not isinstance(prompts, Iterable):
        return prompts
    return np.asarray(prompts).tolist() if hasattr(prompts, "__array__") else list(prompts)


def as_list(prompts: Any) -> list:
    """One prompt or many -> a list of prompts."""
    prompts = listed(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list):
        raise ValueError(f"prompts={prompts!r}: {PROMPTS} is wanted")
    if not prompts:
        raise ValueError(f"prompts is empty: {PROMPTS} is wanted")
    return prompts if any(isinstance(p, str | Iterable) for p in prompts) else [prompts]


def encode(model: Model, prompt: Any, index: int, state: State | None = None) -> list[int]:
    """Token ids to feed, after what a kept state has not been fed yet. Where a state goes on there is no BOS: a text in
    the middle of a sequence is encoded without what a tokenizer sets before a whole one.
    """
    name = f"prompt {index}"
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ValueError(f"{name} is a string, but the checkpoint has no tokenizer; give token ids")
        try:
            ids = model.tokenizer.encode(prompt)
        except (TypeError, UnicodeError) as error:
            raise ValueError(f"{name}={prompt!r} is not text that can be encoded: {error}") from error
        before = model.tokenizer.encode("") if state is not None and state.lengths[index % state.batch] else []
        ids = ids[len(before) :] if ids[: len(before)] == before else ids
    elif not isinstance(row := listed(prompt), list):
        raise ValueError(f"{name} is {prompt!r}: {PROMPTS} is wanted")
    else:
        ids = [whole_number(f"token id in {name}", token, least=-ANY) for token in row]
    bad = [token for token in ids if not 0 <= token < model.config.vocab_size]
    if bad:
        raise ValueError(f"{name} has token id {bad[0]}; the vocabulary has 0 to {model.config.vocab_size - 1}")
    if state is not None and state.pending is not None:
        ids = [int(state.pending[index % state.batch]), *ids]
    if not ids:
        raise ValueError(f"{name} is empty: at least one token is needed")
    return ids


def stops(model: Model, stop: Any) -> tuple[np.ndarray, StopStrings]:
    """Stop token ids, with the EOS ids (padded to a multiple of 8: their number compiles nothing), and strings."""
    if isinstance(stop, bytes | Mapping) or not isinstance(stop, Iterable):
        raise ValueError(f"stop={stop!r}: a string, or a list of strings and token ids, is wanted")
    given = [stop] if isinstance(stop, str) else list(stop)
    strings = [s for s in given if isinstance(s, str)]
    if strings and model.tokenizer is None:
        raise ValueError(f"stop={strings[0]!r} is a string, but the checkpoint has no tokenizer; give token ids")
    if any(not s for s in strings):
        raise ValueError("stop holds an empty string, which would end every row at once")
    most = model.config.vocab_size - 1
    ids = {whole_number("token id in stop", s, least=0, most=most) for s in given if not isinstance(s, str)}
    ids = sorted({*model.eos_token_ids, *ids})
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
