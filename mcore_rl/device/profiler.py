"""Captures what a process does: a trace by torch, or a range that Nsight Systems records."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
