"""Traffic between processes over gloo: rounds of pairs, rates, and processes that fail."""

from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest

from mcore_rl.process.network import find_free_port
from mcore_rl.tools.doctor.machine.traffic import TrafficSpec, measure_traffic, plan_rounds


@pytest.mark.parametrize("size", range(1, 10))
def test_every_pair_meets_once_and_nobody_twice_a_round(size: int) -> None:
    rounds = plan_rounds(size)
    met = sorted(pair for pairs in rounds for pair in pairs)
    assert met == list(combinations(range(size), 2))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)


@pytest.mark.gloo
def test_two_processes_exchange_on_the_device_and_over_the_backend_of_a_run() -> None:
    host = "127.0.0.1"
    port = find_free_port(host)
    specs = [TrafficSpec(rank, 2, host, port, "lo", True, 4, 30.0) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(measure_traffic, specs)
    assert first.error == second.error == ""
    assert first.pairs[1] > 0 and second.pairs[0] > 0
    assert min(first.all_to_all, second.all_to_all) > 0


def test_a_process_without_its_peers_ends_with_an_error() -> None:
    host = "127.0.0.1"
    spec = TrafficSpec(0, 2, host, find_free_port(host), "lo", False, 1, timeout_s=1.0)
    figures = measure_traffic(spec)
    assert figures.pairs == {}
    assert "ended with status 1" in figures.error or "not done in 2 s" in figures.error
