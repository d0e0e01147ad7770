"""What a damaged folder of either kind has to do when it is loaded."""

import gc
import time

import jax
import pytest

from kimi_jax.checkpoints import folders


def fails(folder, config, abstract, shardings, *words: str) -> None:
    """Loading raises a ValueError with these words within a second, and leaves no array behind."""
    gc.freeze()  # so that only what comes from now on is looked through for garbage
    before, begin = len(jax.live_arrays()), time.monotonic()
    with pytest.raises(ValueError) as error:
        folders.load_params(folder, config, abstract, shardings, progress=False)
    assert time.monotonic() - begin < 1.5  # of it, most goes to the type checks of the test run
    message = str(error.value)
    del error
    gc.collect()
    assert len(jax.live_arrays()) == before
    for word in words:
        assert word in message, message
