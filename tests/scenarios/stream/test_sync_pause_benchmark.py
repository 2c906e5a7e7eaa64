"""The benchmark of a decoding engine's pause runs in its smallest size."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.e2e
def test_requests_decode_through_a_sync_of_each_way_and_their_stall_is_measured() -> None:
    options = ["--size", "1", "--repeats", "1", "--prompt-len", "16", "--max-new", "900"]
    figures = figures_of("sync_pause.py", *options, timeout_s=280)["1 MiB large"]
    assert len(figures) == 3
    # A reader without a core reads several tokens at once, so the usual time may even be 0.
    assert all(way["stall"] > 0 and way["sync"] > 0 for way in figures.values()), figures
    assert all(0 <= way["usual"] < 60 for way in figures.values()), figures
