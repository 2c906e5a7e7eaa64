"""Faults of a machine rather than of a process: its network, and its clock."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RATE, BURST, QUEUED = "50mbit", "256kb", "400ms"
LOST_PERCENT = 5
CLOCK_JUMP_S = 300
"""More than any deadline of the disturbed run."""
_TOOLS = ("ip", "nsenter", "tc", "nft")


@contextmanager
def open_namespace() -> Iterator[str | None]:
    """Yield the name of a network namespace with a loopback device; None where none can be had."""
    if os.geteuid() or not all(map(shutil.which, _TOOLS)):
        yield None
        return
    name = f"mcore_rl_faults_{os.getpid()}"
    _call("ip", "netns", "add", name)
    try:
        _call("ip", "-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _call("ip", "netns", "del", name)


def enter_namespace(name: str) -> tuple[str, ...]:
    """Return the words before a command that runs in the namespace; its mounts stay the machine's.

    (Those of `ip netns exec` would be its own, and a full disk would not reach it.)
    """
    return ("nsenter", f"--net=/run/netns/{name}")


@contextmanager
def slow_network(name: str) -> Iterator[None]:
    """Make loopback in a namespace slow, and let it lose packets.

    The netem of tc does both at once, but few kernels of virtual machines have it.
    """
    inside = enter_namespace(name)
    shaped = ("rate", RATE, "burst", BURST, "latency", QUEUED)
    _call(*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *shaped)
    rules = (
        "add table inet faults",
        "add chain inet faults input { type filter hook input priority 0; }",
        f"add rule inet faults input numgen random mod 100 < {LOST_PERCENT} drop",
    )
    _call(*inside, "nft", "\n".join(rules))
    try:
        yield
    finally:
        _call(*inside, "nft", "delete table inet faults")
        _call(*inside, "tc", "qdisc", "del", "dev", "lo", "root")


@contextmanager
def jump_clock() -> Iterator[None]:
    """Put the machine's clock forward, and back after the block; other programs see it, too."""
    _move_clock(CLOCK_JUMP_S)
    try:
        yield
    finally:
        _move_clock(-CLOCK_JUMP_S)


def _move_clock(seconds: float) -> None:
    time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)


def can_set_clock() -> bool:
    """Return whether this process may set the clock (CAP_SYS_TIME, in the machine's own user)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 25 & 1)
    return False


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)
