"""The comparison of GRPO steps with another system runs and prints its figures."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rival", ["trl", "verl"])
def test_it_compares_one_workload(rival: str) -> None:
    options = ("--workloads", "1M-32x64", "--steps", "4", "--repeats", "1", "--against", rival)
    # Two processes are TRL's alone; the search for the fastest way takes a grid of runs.
    options += ("--rival-resources", *(("2", "1", "16") if rival == "trl" else ("1", "2", "32")))
    figures = figures_of("grpo_step.py", *options, timeout_s=1500)
    cell = figures["workloads"]["1M-32x64"]
    assert figures["rival"] == rival
    for system in ("compiled", "plain", "rival"):
        assert cell[f"{system}_response_len"] == 64, system
    for system in ("compiled", "plain"):
        ratio = cell[f"{system}_tokens_per_second"] / cell["rival_tokens_per_second"]
        assert cell[f"{system}_ratio"] == pytest.approx(ratio, rel=1e-2), system
    assert cell["compiled_tokens_per_second"] > cell["plain_tokens_per_second"]
