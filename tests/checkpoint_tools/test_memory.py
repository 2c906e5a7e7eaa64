"""Memory of processes, measured while something runs."""

import os
import subprocess
import sys

from checkpoint_tools.memory import PeakMemory, proportional_bytes


def test_the_peak_includes_memory_that_was_given_back() -> None:
    before = proportional_bytes(os.getpid())
    with PeakMemory([os.getpid()]) as memory:
        block = b"x" * (64 << 20)
        while memory.peak_bytes < before + (60 << 20):
            assert len(block) == 64 << 20
        del block
    assert memory.peak_bytes >= before + (60 << 20)


def test_a_process_that_ended_takes_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert proportional_bytes(process.pid) == 0
