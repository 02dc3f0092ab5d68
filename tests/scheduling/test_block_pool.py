"""BlockPool against a model of it, and its refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidInputError
from jaxserve.scheduling.block_pool import BlockPool


@given(st.integers(2, 12), st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 5))))
def test_references_are_what_the_holders_explain(num_blocks, operations):
    pool = BlockPool(num_blocks)
    holders: list[list[int]] = []
    for name, number in operations:
        if name == "allocate":
            free = pool.num_free
            block_ids = pool.allocate(number)
            assert (block_ids is None) == (number > free)
            if block_ids is not None:
                assert len(set(block_ids)) == number and 0 not in block_ids
                holders.append(block_ids)
        elif holders and name == "share":
            shared = list(holders[number % len(holders)])
            pool.share(shared)
            holders.append(shared)
        elif holders:
            pool.free(holders.pop(number % len(holders)))
        pool.check_integrity(holders)
        assert pool.num_used + pool.num_free == num_blocks - 1
        assert pool.num_used == len({block_id for held in holders for block_id in held})


def test_a_freed_block_is_reused_first():
    pool = BlockPool(10)
    first = pool.allocate(3)
    assert first is not None
    pool.free([first[1]])
    assert pool.allocate(1) == [first[1]]


def test_integrity_check_sees_leaks_and_double_use():
    pool = BlockPool(4)
    held = pool.allocate(2)
    assert held is not None
    with pytest.raises(AssertionError, match="1 references, 0 holders"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="1 references, 2 holders"):
        pool.check_integrity([held, held])
    pool.free(held)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(held)


def test_too_small():
    with pytest.raises(InvalidInputError, match="num_blocks=1"):
        BlockPool(1)
