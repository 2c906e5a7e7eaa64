"""A trace names the work of the block and has the form that Perfetto opens."""

import gzip
import json
from pathlib import Path

import torch

from mcore_rl.device.profiler import nsys_range, record_launches, torch_trace


def test_a_trace_is_in_the_trace_event_format(tmp_path: Path) -> None:
    """The JSON array format of Chrome's Trace Event Format: complete events have ts and dur."""
    path = tmp_path / "profile" / "trace.json.gz"
    with torch_trace(path):
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    trace = json.loads(gzip.decompress(path.read_bytes()))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in complete:
        assert {"name", "ts", "dur", "pid", "tid"} <= event.keys()
    assert "aten::mm" in {event["name"] for event in complete}


def test_without_a_gpu_there_is_no_range_to_record() -> None:
    with nsys_range():
        pass


def test_the_operators_of_a_cpu_are_recorded_in_order_with_their_times() -> None:
    matrix = torch.ones(64, 64)
    launches = record_launches(lambda: (matrix @ matrix).sin())
    assert [launch.name for launch in launches] == ["aten::matmul", "aten::sin"]
    assert launches[0].start_s < launches[0].end_s <= launches[1].start_s
