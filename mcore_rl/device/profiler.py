"""Captures what a process does: a trace or a list of kernels by torch, or a range that Nsight
Systems records."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mcore_rl.device import has_cuda, synchronize
from mcore_rl.process.disk import report_full_disk


@contextmanager
def torch_trace(path: Path) -> Iterator[None]:
    """Write a trace of the block to `path` (.json.gz), in the format that Perfetto opens."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if has_cuda() else [])
    with profile(activities=activities) as trace:
        yield
        synchronize()
    with report_full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))


@dataclass(frozen=True)
class Launch:
    """A kernel or copy of the GPU; on a CPU an operator of torch that no other called."""

    name: str
    start_s: float
    end_s: float


def record_launches(work: Callable[[], object]) -> list[Launch]:
    """Return what `work` had this process's device do, in the order of the starts."""
    on_gpu = has_cuda()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        work()
        synchronize()
    wanted = "CUDA" if on_gpu else "CPU"
    events: Sequence[Any] = trace.events() or ()
    launches = [
        Launch(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in events
        if event.device_type.name == wanted and event.cpu_parent is None
    ]
    return sorted(launches, key=lambda launch: launch.start_s)


@contextmanager
def nsys_range() -> Iterator[None]:
    """Let Nsight Systems record the block, if it runs this process with -c cudaProfilerApi."""
    if has_cuda():
        torch.cuda.profiler.start()
    try:
        yield
    finally:
        if has_cuda():
            synchronize()
            torch.cuda.profiler.stop()
