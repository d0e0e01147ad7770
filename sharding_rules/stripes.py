"""Which rank of cp holds a position, and in which slot: pure functions of the global position.

Positions are dealt out in blocks of `block` consecutive ones, round robin over `ranks` stripes:

    owner(p) = (p // block) mod ranks
    slot(p)  = (p // (block * ranks)) * block + p mod block
    local_length(L, r) = (L // (block * ranks)) * block + clip(L mod (block * ranks) - r * block, 0, block)

Prompt and decode follow the same rule, so nothing depends on how a sequence was cut into calls. Plain integers, numpy
and JAX arrays all work.

Source: the global block ledger of TensorRT-LLM (PR 17866); the interleave of vLLM's decode context parallelism.
"""

from typing import Any


def owner(position: Any, block: int, ranks: int) -> Any:
    """The stripe which holds `position`."""
    return (position // block) % ranks


def slot(position: Any, block: int, ranks: int) -> Any:
    """Where in its stripe `position` lies."""
    return (position // (block * ranks)) * block + position % block


def position(slot: Any, rank: Any, block: int, ranks: int) -> Any:
    """The global position in `slot` of stripe `rank`: the inverse of `owner` and `slot`."""
    return (slot // block) * (block * ranks) + rank * block + slot % block


def local_length(length: Any, rank: Any, block: int, ranks: int) -> Any:
    """How many of the first `length` positions stripe `rank` holds."""
    rest = length % (block * ranks) - rank * block
    return (length // (block * ranks)) * block + _clip(rest, block)


def capacity(tokens: int, block: int, ranks: int) -> int:
    """`tokens` rounded up to whole rounds of blocks, so that all stripes are of one length."""
    return -(-tokens // (block * ranks)) * block * ranks


def _clip(x: Any, high: int) -> Any:
    return x.clip(0, high) if hasattr(x, "clip") else min(max(x, 0), high)
