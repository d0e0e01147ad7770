"""Which rank holds a position: the closed forms against counting, for any block, ranks and length."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding_rules import stripes

positions = st.integers(0, 1 << 40)
blocks, ranks_of = st.integers(1, 70), st.integers(1, 9)


@given(positions, blocks, ranks_of)
def test_position_is_the_inverse_of_owner_and_slot(p, block, ranks):
    owner, slot = stripes.owner(p, block, ranks), stripes.slot(p, block, ranks)
    assert 0 <= owner < ranks and slot >= 0
    assert stripes.position(slot, owner, block, ranks) == p


@given(st.integers(0, 1 << 40), blocks, ranks_of, st.data())
def test_owner_and_slot_are_the_inverse_of_position(slot, block, ranks, data):
    rank = data.draw(st.integers(0, ranks - 1))
    p = stripes.position(slot, rank, block, ranks)
    assert (stripes.owner(p, block, ranks), stripes.slot(p, block, ranks)) == (rank, slot)


@given(st.integers(0, 600), blocks, ranks_of)
def test_local_length_is_what_counting_gives(length, block, ranks):
    owners = [stripes.owner(p, block, ranks) for p in range(length)]
    local = [stripes.local_length(length, rank, block, ranks) for rank in range(ranks)]
    assert local == [owners.count(rank) for rank in range(ranks)]


@given(positions, blocks, ranks_of)
def test_local_lengths_add_up_and_differ_by_at_most_a_block(length, block, ranks):
    local = [stripes.local_length(length, rank, block, ranks) for rank in range(ranks)]
    assert sum(local) == length
    assert max(local) - min(local) <= block
    assert sorted(local, reverse=True) == local


@given(st.integers(0, 600), blocks, ranks_of)
def test_a_new_token_goes_to_the_slot_after_its_owners_last(length, block, ranks):
    """So a stripe has no holes: its first local_length slots are the ones in use."""
    owner = stripes.owner(length, block, ranks)
    assert stripes.slot(length, block, ranks) == stripes.local_length(length, owner, block, ranks)


@given(st.integers(1, 5000), blocks, ranks_of)
def test_capacity_is_the_smallest_number_of_whole_rounds(tokens, block, ranks):
    room = stripes.capacity(tokens, block, ranks)
    assert room % (block * ranks) == 0
    assert room - block * ranks < tokens <= room
    assert stripes.slot(tokens - 1, block, ranks) < room // ranks


def test_the_rule_written_out():
    """Blocks of two over three ranks: 0 1 | 2 3 | 4 5 | 6 7 | ..."""
    p = range(14)
    assert [stripes.owner(i, 2, 3) for i in p] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0, 0]
    assert [stripes.slot(i, 2, 3) for i in p] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 4, 5]
    assert [stripes.local_length(9, r, 2, 3) for r in range(3)] == [4, 3, 2]


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_arrays_give_what_integers_give(array):
    p = np.arange(100, dtype=np.int32)
    for rule in (stripes.owner, stripes.slot):
        assert np.asarray(rule(array(p), 4, 3)).tolist() == [rule(int(i), 4, 3) for i in p]
    for rank in range(3):
        assert np.asarray(stripes.local_length(array(p), rank, 4, 3)).tolist() == [
            stripes.local_length(int(i), rank, 4, 3) for i in p
        ]
        assert np.asarray(stripes.position(array(p), rank, 4, 3)).tolist() == [
            stripes.position(int(i), rank, 4, 3) for i in p
        ]
