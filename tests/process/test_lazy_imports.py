"""The collector is off during imports, on afterwards, and leaves imported objects alone."""

import gc
from collections.abc import Iterator

import pytest

from mcore_rl.process.gc_pause import collect_from_here, without_collector


@pytest.fixture(autouse=True)
def restore_collector() -> Iterator[None]:
    yield
    collect_from_here()


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_is_off_in_the_body_and_on_afterwards(fails: bool) -> None:
    try:
        with without_collector():
            assert not gc.isenabled()
            if fails:
                raise ImportError
    except ImportError:
        assert fails
    assert gc.isenabled()


def test_objects_from_before_are_frozen() -> None:
    gc.unfreeze()
    kept = [[] for _ in range(1000)]
    collect_from_here()
    assert gc.isenabled() and gc.get_freeze_count() >= len(kept)
