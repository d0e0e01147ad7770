"""What a user may give as prompts and stops; the rest is refused by name, whatever its type."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.generation import prompting


@pytest.fixture
def model(models):
    return models("kimi-linear-tiny")


@pytest.mark.parametrize("prompts", [[73, 110], (73, 110), np.array([73, 110]), jnp.array([73, 110]), iter([73, 110])])
def test_one_prompt_of_ids_may_come_in_any_row_of_numbers(model, prompts):
    (prompt,) = prompting.as_list(prompts)
    assert prompting.encode(model, prompt, 0) == [73, 110]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts=None: a string, a list of token ids, or a list of those is wanted"),
        (5, "prompts=5: a string"),
        (b"In", "prompts=b'In': a string"),
        ({"a": 1}, "prompts={'a': 1}: a string"),
        ({73, 110}, "a string"),
        ([], "prompts is empty"),
        ([1.7, 2.9], "token id in prompt 0=1.7: a whole number"),
        ([True], "token id in prompt 0=True: a whole number"),
        ([None], "token id in prompt 0=None: a whole number"),
        ([73, "In"], "prompt 0 is 73: a string"),
        ([["In", "And"]], "token id in prompt 0='In': a whole number"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(model, prompts, message):
    with pytest.raises(ValueError, match=message):
        [prompting.encode(model, prompt, i) for i, prompt in enumerate(prompting.as_list(prompts))]


@pytest.mark.parametrize("stop", [3, None, b"a", {"a": 1}, [None], [1.5], [-5], [2**40]])
def test_what_is_no_stop_is_refused_by_name(model, stop):
    with pytest.raises(ValueError, match="stop"):
        prompting.stops(model, stop)
