"""Renamed metrics keep their former names for one version."""

from mcore_rl.metrics.names import with_former_names


def test_a_renamed_metric_is_kept_under_both_names() -> None:
    metrics = {"sync/seconds": 1.0, "time/sync": 2.0, "time/pause": 3.0, "time/step": 4.0}
    former = {"refit/seconds": 1.0, "time/refit": 2.0, "time/settle": 3.0}
    assert with_former_names(metrics) == {**metrics, **former}


def test_metrics_without_a_former_name_stay_as_they_are() -> None:
    assert with_former_names({"loss/policy": 1.0}) == {"loss/policy": 1.0}
