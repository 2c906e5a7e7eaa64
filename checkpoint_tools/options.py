"""Memory budget, workers and progress bar of the commands that read tensors."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from checkpoint_tools.pool import PeakMemory, Pool

T = TypeVar("T")
R = TypeVar("R")
UNITS = {
    "": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


@dataclass(frozen=True)
class Effort:
    """The resources a command may take: bytes of buffers over all workers, and worker processes."""

    memory_bytes: int
    num_workers: int

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"--workers={self.num_workers}: at least 1")

    @property
    def worker_bytes(self) -> int:
        return self.memory_bytes // self.num_workers


def add_effort(command: argparse.ArgumentParser) -> None:
    """Add the options that `read_effort` reads."""
    command.add_argument(
        "--memory-budget",
        type=parse_bytes,
        default=512 << 20,
        metavar="SIZE",
        help="size of the buffers of all workers together (512MiB)",
    )
    command.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes (%(default)s)"
    )


def read_effort(args: argparse.Namespace) -> Effort:
    """Return the effort that the parsed options name. Raises ValueError for less than a worker."""
    return Effort(args.memory_budget, args.workers)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size like 512MiB, 4GB or 1048576. Raises ValueError with the text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is not a size: write for example 512MiB, 4GiB or 500MB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def show_bytes(num_bytes: float) -> str:
    """Return a size for people, such as "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def work_through(
    make: Callable[[], Callable[[T], R]],
    tasks: Sequence[T],
    size_of: Callable[[T], int],
    effort: Effort,
    text: str,
    on_result: Callable[[T, R], Any],
    lane_of: Callable[[T], Hashable] = lambda _: None,
) -> int:
    """Carry out `tasks` in workers and call `on_result(task, result)` for each in this process.

    Tasks end in any order; for `lane_of` see `Pool.run`. Returns the peak memory of
    all processes in bytes.
    """
    with (
        Pool(make, effort.num_workers) as pool,
        PeakMemory(pool.process_ids) as memory,
        _progress(text, sum(map(size_of, tasks))) as advance,
    ):
        for task, result in pool.run(tasks, lane_of):
            on_result(task, result)
            advance(size_of(task))
    return memory.peak_bytes


@contextmanager
def _progress(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the bytes just done; it moves a bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(text, total=total)
        yield lambda count: progress.advance(bar, count)
