"""The benchmarks of steps, of merges and of a run's start run in their smallest sizes."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.slow
def test_the_benchmark_of_steps_on_a_gpu_compares_kinds_of_products() -> None:
    variants = ["--variants", "separate,grouped_mm"]
    options = [*variants, "--steps", "2", "--kernels", "1000"]
    figures = figures_of("gpu_step.py", *options, timeout_s=200)
    steps = [by_size["256"] for by_size in figures["variants"].values()]
    assert len(steps) == 2
    assert steps[0]["second_loss"] == pytest.approx(steps[1]["second_loss"], rel=1e-4)
    for step in steps:
        assert step["tokens_per_s"] > 0 and step["mfu"] is None
        assert 0 < step["busy_s"] <= step["profiled_s"]
        assert step["launches"] == sum(kernel["runs"] for kernel in step["kernels"])


@pytest.mark.gloo
@pytest.mark.slow
def test_the_benchmark_of_merges_ends_in_its_figures() -> None:
    sizes = ["--layers", "2", "--experts", "4", "--vocab", "1024", "--repeats", "1"]
    figures = figures_of("merge.py", *sizes, timeout_s=280)
    assert figures["resumed_equal"]
    for way in ("page_cache", "fsync"):
        assert figures[way]["best_ratio"] > 0
        assert figures[way]["cp_s"] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_the_benchmark_of_starts_ends_in_its_figures() -> None:
    figures = figures_of("startup.py", "--repeats", "1", timeout_s=400)
    assert 0 < figures["imported_s"] <= figures["ray_s"] <= figures["linked_s"]
    assert figures["linked_s"] <= figures["first_token_s"] == figures["least_s"]
    assert figures["cpu_s"] >= sum(figures["processes"].values()) - 0.1 > 0
