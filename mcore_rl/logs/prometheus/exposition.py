"""Writes metrics in Prometheus' text format.

router/layer_3/idle_share=0.1  -->  mcore_rl_router_layer{run="grpo",i="3",name="idle_share"} 0.1

A metric with placeholders in docs/metrics.md is one of Prometheus' with labels.
"""

import math
import re
from collections.abc import Iterable, Mapping

from mcore_rl.logs.names import METRICS, find_documented

PREFIX = "mcore_rl"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OF_RUN: Mapping[str, str] = {
    "mcore_rl_step": "last step that was logged",
    "mcore_rl_steps_total": "steps of the run",
    "mcore_rl_logged_seconds": "time of the last row, seconds since 1970",
    "mcore_rl_alarm": "1 while the alarm of this name is on (monitoring.md)",
}
"""Values beside those of metrics.jsonl, with their meanings."""
_MEANINGS = {name: text for meanings in METRICS.values() for name, text in meanings.items()}
Value = tuple[Mapping[str, str], float]
"""(labels, value)"""


def name_in_prometheus(metric: str) -> tuple[str, dict[str, str]]:
    """Return the name and labels under which Prometheus gets a metric of a run."""
    documented, labels = find_documented(metric) or (metric, {})
    fixed = re.sub(r"<\w+>", "", documented)
    return "_".join([PREFIX, *re.findall(r"[A-Za-z0-9]+", fixed)]), labels


def list_names() -> dict[str, str]:
    """Return each name that Prometheus may get, with its meaning."""
    documented = {name_in_prometheus(name)[0]: text for name, text in _MEANINGS.items()}
    return {**OF_RUN, **documented}


def write_exposition(run: str, metrics: Mapping[str, float], of_run: Mapping[str, float]) -> str:
    """Return the text that Prometheus reads.

    run       name of the run, a label of each value
    metrics   values by the names of docs/metrics.md
    of_run    values by the names of OF_RUN; that of an alarm is mcore_rl_alarm/<name>
    """
    families: dict[str, list[Value]] = {}
    for name, value in of_run.items():
        family, _, alarm = name.partition("/")
        families.setdefault(family, []).append(({"alarm": alarm} if alarm else {}, value))
    for metric, value in metrics.items():
        family, labels = name_in_prometheus(metric)
        families.setdefault(family, []).append((labels, value))
    meanings = list_names()
    return "".join(
        _write_family(name, meanings.get(name, ""), run, values)
        for name, values in families.items()
    )


def _write_family(name: str, meaning: str, run: str, values: Iterable[Value]) -> str:
    lines = [f"# HELP {name} {_escape(meaning)}", f"# TYPE {name} gauge"]
    for labels, value in values:
        shown = ",".join(f'{key}="{_escape(text)}"' for key, text in {"run": run, **labels}.items())
        lines.append(f"{name}{{{shown}}} {_spell(value)}")
    return "\n".join([*lines, ""])


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _spell(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))
