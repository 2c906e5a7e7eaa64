"""The comparison of GRPO steps with another system runs and prints its figures."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rival", ["trl", "verl"])
def test_it_compares_one_workload(rival: str) -> None:
    options = ("--workloads", "1M-32x64", "--steps", "4", "--repeats", "1", "--against", rival)
    if rival == "verl":  # a start of it takes a minute; the search of TRL's resources is tried, too
        options += ("--rival-resources", "2", "32")
    figures = figures_of("grpo_step.py", *options, timeout_s=1500)
    cell = figures["workloads"]["1M-32x64"]
    assert figures["rival"] == rival
    assert cell["response_len"] == cell["rival_response_len"] == 64
    assert figures["geometric_mean"] == cell["ratio"] > 0
