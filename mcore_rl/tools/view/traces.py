"""Writes phases and engines' loads as a trace that Perfetto (ui.perfetto.dev) opens."""

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.tools.view.log_lines import LoggedLoad, Phase


def make_trace(
    name: str, phases: Sequence[Phase], loads: Mapping[str, Sequence[LoggedLoad]]
) -> dict[str, Any]:
    """Return the trace event format: a slice for each phase, counters for each engine.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": name}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "controller"}},
    ]
    for phase in phases:
        events.append(
            {
                "ph": "X",
                "name": phase.name,
                "cat": "phase",
                "pid": 1,
                "tid": 1,
                "ts": round(phase.start_s * 1e6),
                "dur": round((phase.end_s - phase.start_s) * 1e6),
                "args": {"step": phase.step},
            }
        )
    for engine, own in loads.items():
        for load in own:
            counters: dict[str, dict[str, float]] = {
                "requests": {"running": load.running, "queued": load.queued},
                "KV cache": {"share": load.kv_share},
            }
            for counter, values in counters.items():
                events.append(
                    {
                        "ph": "C",
                        "name": f"{engine}: {counter}",
                        "pid": 1,
                        "ts": round(load.time_s * 1e6),
                        "args": values,
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
