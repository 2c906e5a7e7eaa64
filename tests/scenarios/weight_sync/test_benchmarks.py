"""The benchmarks of links and of weight syncs run in their smallest sizes."""

import pytest

from tests.support.benchmarks import figures_of


@pytest.mark.slow
def test_the_benchmark_of_buckets_on_a_gpu_ends_in_its_figures() -> None:
    figures = figures_of("gpu_sync.py", timeout_s=100)["gb_per_s"]["1 MiB"]
    assert figures.pop("copy") > 0
    assert list(figures) == ["dense", "rows", "odd"]
    assert all(rates["pack calls"] > 0 < rates["place calls"] for rates in figures.values())


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


@pytest.mark.gloo
@pytest.mark.slow
def test_the_benchmark_of_ranks_that_link_ends_in_its_figures() -> None:
    options = ["--layers", "1", "--trainers", "1,2", "--engines", "2", "--repeats", "1"]
    figures = figures_of("link_ranks.py", *options, timeout_s=120)
    assert list(figures) == ["768 1->2", "768 2->2"]
    assert all(sides["trainer_s"] > 0 and sides["engine_s"] > 0 for sides in figures.values())


@pytest.mark.slow
def test_the_benchmark_of_differences_ends_in_its_figures() -> None:
    sizes = ["--gbit", "", "--mib", "4", "--repeats", "1"]
    figures = figures_of("delta_sync.py", *sizes, timeout_s=170)
    assert figures["shared memory"]["bytes_share"] == 1.0
    assert figures["shared memory"]["broadcast_s"] > 0


@pytest.mark.slow
def test_the_benchmark_of_changes_ends_in_its_figures() -> None:
    figures = figures_of("delta_changes.py", "--models", "mixture", "--steps", "2", timeout_s=170)
    assert 0 < figures["models"]["mixture"]["mean_share"] < 0.5


@pytest.mark.e2e
@pytest.mark.slow
def test_all_ways_leave_the_same_weights_and_the_benchmark_ends_in_its_figures() -> None:
    options = ["--sizes", "1", "--kinds", "large", "--repeats", "1"]
    figures = figures_of("refit.py", *options, timeout_s=280)["1 MiB large"]
    ways = [value for value in figures.values() if isinstance(value, dict)]
    assert len(ways) == 4
    assert all(way["seconds"] > 0 and way["first_sync_seconds"] >= 0 for way in ways)
    assert figures["share of a plain copy by shared memory"] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_requests_decode_through_a_sync_of_each_way_and_their_stall_is_measured() -> None:
    options = ["--size", "1", "--repeats", "1", "--prompt-len", "16", "--max-new", "900"]
    figures = figures_of("sync_pause.py", *options, timeout_s=280)["1 MiB large"]
    assert len(figures) == 3
    # Not which is longer: a sync of 1 MiB is shorter than a token takes on a busy machine.
    assert all(way[name] > 0 for way in figures.values() for name in ("stall", "usual", "sync"))


@pytest.mark.e2e
@pytest.mark.slow
def test_factors_leave_the_weights_of_a_whole_sync_and_the_benchmark_ends_in_its_figures() -> None:
    options = ["--kind", "small", "--rank", "4", "--repeats", "1", "--turns", "1"]
    figures = figures_of("lora.py", *options, timeout_s=280)
    assert figures["times_fewer_bytes"] > 5
    assert all(value > 0 for value in figures.values())
