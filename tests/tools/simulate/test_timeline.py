"""Timelines of simulations, as traces and pictures."""

import json
from pathlib import Path

from mcore_rl.tools.simulate.simulate import SHOWN_ENGINES, Timeline


def test_a_trace_has_spans_queues_and_marks(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add_span("trainer step", 1.0, 3.5)
    note = timeline.new_queue()
    for at_s, running in ((0.0, 1), (0.1, 2), (1.0, 3), (1.1, 0)):
        note(at_s, running, 5)
    timeline.marks.append((2.0, "a GPU failed"))
    timeline.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    [span] = [event for event in events if event["ph"] == "X"]
    assert (span["name"], span["ts"], span["dur"]) == ("trainer step", 1e6, 2.5e6)
    queue = [(e["ts"], e["args"]["running"]) for e in events if e["ph"] == "C"]
    assert queue == [(0.0, 1), (1e6, 3), (1.1e6, 0)], "close changes are one, but for an empty one"
    assert [event["name"] for event in events if event["ph"] == "i"] == ["a GPU failed"]
    timeline.draw(tmp_path / "timeline.png", "a title")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_first_engines_are_kept() -> None:
    timeline = Timeline()
    for _ in range(SHOWN_ENGINES + 3):
        timeline.new_queue()(0.0, 1, 1)
    assert len(timeline.queues) == SHOWN_ENGINES
