"""The benchmark of links runs in its smallest size, with an engine and with stand-ins."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.e2e
@pytest.mark.slow
def test_the_benchmark_of_links_ends_in_its_figures() -> None:
    options = ["--layers", "1", "--repeats", "1"]
    figures = figures_of("link.py", *options, timeout_s=170)["1 layers"]
    assert figures["expert_tensors"] == 768
    for way in ("recorded", "listed"):
        assert figures[f"{way}_link_s"] >= figures[f"{way}_least_s"] > 0
        assert figures[f"{way}_first_sync_s"] > 0


@pytest.mark.gloo
@pytest.mark.slow
def test_stand_ins_for_many_ranks_link_to_all_engines() -> None:
    options = ["--ranks", "16,8", "--engine-ranks", "4", "--layers", "1", "--repeats", "2"]
    figures = figures_of("link.py", *options, timeout_s=120)
    assert (figures["trainer_ranks"], figures["engines"]) == (16, 2)
    assert figures["all_engines_s"] > 0 and figures["one_engine_s"] > 0
    assert figures["trainers_cpu_s"] > 0 and figures["engines_cpu_s"] > 0
    slowest = [figures[f"slowest_{side}_rank_cpu_s"] for side in ("trainer", "engine")]
    assert min(slowest) > 0
    assert figures["critical_cpu_s"] >= figures["controller_cpu_s"] + min(slowest)
