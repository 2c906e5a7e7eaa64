"""The comparison of GRPO steps with TRL runs and prints its figures."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.slow
def test_it_compares_one_workload() -> None:
    options = ("--workloads", "1M-32x64", "--steps", "4", "--repeats", "1")
    figures = figures_of("grpo_step.py", *options, timeout_s=900)
    cell = figures["workloads"]["1M-32x64"]
    assert cell["response_len"] == cell["trl_response_len"] == 64
    assert figures["geometric_mean"] == cell["ratio"] > 0
