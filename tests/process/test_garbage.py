"""The collector rests in the block and works again after it, also after an error."""

import gc

import pytest

from mcore_rl.process.gc_pause import pause_collections


def collections_of(num_objects: int) -> int:
    """The collections that making so many objects brings about."""
    before = sum(generation["collections"] for generation in gc.get_stats())
    kept = [[] for _ in range(num_objects)]
    assert len(kept) == num_objects
    return sum(generation["collections"] for generation in gc.get_stats()) - before


def test_objects_made_in_the_block_cause_no_collection() -> None:
    with pause_collections():
        assert collections_of(100_000) == 0
    assert gc.isenabled()
    assert collections_of(100_000) > 0


def test_collections_go_on_after_an_error_and_after_the_outermost_block() -> None:
    with pytest.raises(ValueError, match="inside"), pause_collections():
        with pause_collections():
            pass
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()
