"""Memory of processes, measured while something runs."""

import mmap
import os
import subprocess
import sys
import time

from checkpoint_tools.pool import PeakMemory, measure_proportional


def test_the_peak_includes_memory_that_was_given_back() -> None:
    before = measure_proportional(os.getpid())
    # Not by malloc: this process may have kept what it freed, and grow by nothing.
    with PeakMemory([os.getpid()]) as memory, mmap.mmap(-1, 64 << 20) as block:
        block.write(b"x" * len(block))
        deadline = time.monotonic() + 60
        while memory.peak_bytes < before + (60 << 20) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert memory.peak_bytes >= before + (60 << 20)


def test_a_process_that_ended_takes_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert measure_proportional(process.pid) == 0
