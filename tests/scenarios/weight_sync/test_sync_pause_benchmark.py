"""The benchmark of a decoding engine's pause runs in its smallest size."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.e2e
@pytest.mark.slow
def test_requests_decode_through_a_sync_of_each_way_and_their_stall_is_measured() -> None:
    options = ["--size", "1", "--repeats", "1", "--prompt-len", "16", "--max-new", "900"]
    figures = figures_of("sync_pause.py", *options, timeout_s=280)["1 MiB large"]
    assert len(figures) == 3
    # Not which is longer: a sync of 1 MiB is shorter than a token takes on a busy machine.
    assert all(way[name] > 0 for way in figures.values() for name in ("stall", "usual", "sync"))
