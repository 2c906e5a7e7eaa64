"""Keeps what happens in a simulation, and draws it: a picture, and a trace for Perfetto."""

import json
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from mcore_rl.process.disk import write_whole

SHOWN_ENGINES = 32
"""More would make the trace too large to open."""
INTERVAL_S = 0.5
"""Changes of an engine's queue within this time are one."""
COLORS = {
    "trainer step": "#4c72b0",
    "trainer log-probs": "#64b5cd",
    "critic": "#8172b2",
    "canary": "#ccb974",
}


class Timeline:
    """Spans of the ranks and the queues of the first engines, in seconds."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.queues: list[list[tuple[float, int, int]]] = []
        """Time, running and waiting requests of each engine."""
        self.marks: list[tuple[float, str]] = []

    def add_span(self, name: str, begin_s: float, end_s: float) -> None:
        self.spans.append((name, begin_s, end_s))

    def new_queue(self) -> Callable[[float, int, int], None]:
        """Return what an engine calls with its requests; only the first engines are kept."""
        if len(self.queues) == SHOWN_ENGINES:
            return lambda now_s, running, waiting: None
        queue: list[tuple[float, int, int]] = []
        self.queues.append(queue)

        def note(now_s: float, running: int, waiting: int) -> None:
            if queue and now_s - queue[-1][0] < INTERVAL_S and running:
                return
            queue.append((now_s, running, waiting))

        return note

    def write_trace(self, path: Path) -> None:
        """Write the trace event format, which https://ui.perfetto.dev opens."""
        events: list[dict[str, object]] = [
            {
                "name": name,
                "ph": "X",
                "pid": 0,
                "tid": 0,
                "ts": begin_s * 1e6,
                "dur": (end_s - begin_s) * 1e6,
            }
            for name, begin_s, end_s in self.spans
        ]
        for k, queue in enumerate(self.queues):
            events += [
                {
                    "name": f"engine {k}",
                    "ph": "C",
                    "pid": 1,
                    "ts": at_s * 1e6,
                    "args": {"running": running, "waiting": waiting},
                }
                for at_s, running, waiting in queue
            ]
        events += [
            {"name": what, "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": at_s * 1e6}
            for at_s, what in self.marks
        ]
        names = {0: "ranks", 1: "engines"}
        events += [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
            for pid, name in names.items()
        ]
        write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def draw(self, path: Path, title: str) -> None:
        """Write a PNG: the ranks' work above, the engines' running requests below."""
        matplotlib.use("Agg")
        rows = max(len(self.queues), 1)
        figure = Figure(figsize=(12, 2.2 + 0.22 * rows), layout="constrained")
        ranks, engines = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 1 + 0.25 * rows]}
        )
        kinds = dict.fromkeys(name for name, _, _ in self.spans)
        for kind in kinds:
            bars = [(begin, end - begin) for name, begin, end in self.spans if name == kind]
            ranks.broken_barh(bars, (0, 1), label=kind, facecolors=COLORS.get(kind, "#dd8452"))
        for at_s, _ in self.marks:
            ranks.axvline(at_s, color="#c44e52", linewidth=1)
        ranks.set_yticks([])
        ranks.set_title(title)
        ranks.legend(loc="upper right", fontsize="x-small", ncols=len(kinds) or 1)
        most = max((running for queue in self.queues for _, running, _ in queue), default=1) or 1
        for k, queue in enumerate(self.queues):
            times = [at_s for at_s, _, _ in queue]
            heights = [k + 0.9 * running / most for _, running, _ in queue]
            engines.fill_between(times, k, heights, step="post", color="#55a868")
        engines.set_ylabel(f"engines; full height: {most} requests", fontsize="small")
        engines.set_yticks([])
        engines.set_xlabel("seconds")
        figure.savefig(path, dpi=110)
