"""Tells how much host memory this process could still take."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def count_free_bytes(cgroup: Path = CGROUP) -> int:
    """Return the memory that is free or cached: of the machine, or of the container if it is less.

    A container's bound is that of version 2 of cgroups.
    """
    free = psutil.virtual_memory().available
    try:
        bound = (cgroup / "memory.max").read_text().strip()
        taken = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return free
    if bound == "max":
        return free
    counts = {name: int(value) for name, value in map(str.split, lines)}
    cached = counts.get("active_file", 0) + counts.get("inactive_file", 0)
    return min(free, max(int(bound) - taken + cached, 0))
