"""A process keeps the memory that it frees, and glibc by itself does not."""

import json
import subprocess
import sys

# Small allocations may cut what was freed, until there is room for a tensor beside them: the steps
# are repeated. The kernel gives huge pages when it has them, and counts one fault for each: here it
# must not.
PROGRAM = """
import ctypes
import json
import resource

import torch

from mcore_rl.cpu.host_allocator import keep_freed_memory

PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0


def faults_of_steps():
    torch.zeros(50_000_000).sum().item()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(50_000_000).sum().item()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


plain = faults_of_steps()
keep_freed_memory()
faults_of_steps()
print(json.dumps([plain, min(faults_of_steps() for _ in range(4))]))
"""
PAGES = 50_000_000 * 4 // 4096


def test_tensors_of_the_next_step_take_the_memory_of_the_last_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    plain, kept = json.loads(done.stdout)
    assert plain > 4 * PAGES, "glibc keeps freed memory by itself: delete keep_freed_memory"
    assert kept < PAGES // 10
