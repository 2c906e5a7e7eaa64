"""Prometheus gets each metric of a run under one name; the dashboard asks for nothing else."""

import json
import math
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mcore_rl.logs.names import METRICS
from mcore_rl.logs.prometheus.server import (
    list_names,
    name_in_prometheus,
    write_exposition,
)

DASHBOARD = Path("docs/grafana.json")
NAMES = [name for meanings in METRICS.values() for name in meanings]
FUNCTIONS = {"time", "label_values", "run"}


def read(text: str) -> dict[tuple[str, str], float]:
    """Return the values by (name, labels other than the run), as Prometheus' client reads them."""
    return {
        (sample.name, " ".join(f"{k}={v}" for k, v in sample.labels.items() if k != "run")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["run"] == 'my "run"\\'
    }


def test_prometheus_reads_names_labels_and_values() -> None:
    metrics = {
        "reward/mean": 0.25,
        "time/step": 3.0,
        "time/rollout": 2.0,
        "router/layer_3/idle_share": 0.1,
        "reward/part/a\nb": math.inf,
        "kl/ref": math.nan,
    }
    text = write_exposition('my "run"\\', metrics, {"mcore_rl_step": 7, "mcore_rl_alarm/drift": 1})
    values = read(text)
    assert math.isnan(values.pop(("mcore_rl_kl_ref", "")))
    assert values == {
        ("mcore_rl_step", ""): 7,
        ("mcore_rl_alarm", "alarm=drift"): 1,
        ("mcore_rl_reward_mean", ""): 0.25,
        ("mcore_rl_time_step", ""): 3.0,
        ("mcore_rl_time", "phase=rollout"): 2.0,
        ("mcore_rl_router_layer", "i=3 name=idle_share"): 0.1,
        ("mcore_rl_reward_part", "name=a\nb"): math.inf,
    }
    assert "# HELP mcore_rl_reward_mean mean reward of the samples the step trains on" in text


def test_no_two_metrics_share_a_name() -> None:
    names = [name_in_prometheus(name)[0] for name in NAMES]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return targets + [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_asks_for_metrics_that_exist(expression: str) -> None:
    bare = re.sub(r"\{[^}]*\}", "", expression)
    names = set(re.findall(r"[a-z]\w+", bare)) - FUNCTIONS
    assert names and names <= list_names().keys()


def test_the_dashboard_shows_each_panel_in_a_place_of_its_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["id"] for panel in panels}) >= 15
