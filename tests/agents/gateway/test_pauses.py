"""The garbage collector's settings while a gateway runs."""

import gc
from collections.abc import Iterator

import pytest

from mcore_rl.agents.gateway.gateway import collect_garbage_rarely


@pytest.fixture(autouse=True)
def freeze_again() -> Iterator[None]:
    """The collector is to stay out of what the test run has imported (tests/conftest.py)."""
    yield
    gc.freeze()


def test_the_collector_runs_rarely_inside_and_as_before_afterwards():
    before = gc.get_threshold()
    with pytest.raises(KeyError), collect_garbage_rarely():
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_cycles_are_still_found():
    class Node:
        pass

    with collect_garbage_rarely():
        node = Node()
        node.__dict__["self"] = node
        del node
        assert gc.collect() > 0
