"""Cgroups of one worker: bounds of memory, processes and processors that hold for all together.

Where they cannot be written, make_cgroup returns None, and limits per process remain.
"""

import contextlib
import errno
import itertools
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_PREFIX = "mcore_rl_sandbox_"
_OWN = "mcore_rl_caller_"
_REMOVE_S = 5.0
_PERIOD_US = 100_000
_counter = itertools.count()


@dataclass(frozen=True)
class _Names:
    """Names of a version's files."""

    tasks: str
    memory: str
    swap: str
    peak: str
    usage: str
    events: str
    processes: str = "pids.max"
    processor: str = "cpu.max"


_V1 = _Names(
    "tasks",
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.max_usage_in_bytes",
    "memory.usage_in_bytes",
    "memory.oom_control",
    processor="cpu.cfs_quota_us",
)
_V2 = _Names(
    "cgroup.procs",
    "memory.max",
    "memory.swap.max",
    "memory.peak",
    "memory.current",
    "memory.events",
)


class Cgroup:
    """A cgroup for the programs of one worker, one box after another.

    folders   for each controller, its folder; the same for all in version 2
    """

    def __init__(self, folders: Mapping[str, Path], is_v1: bool) -> None:
        self._folders = dict(folders)
        self._is_v1 = is_v1
        self._names = _V1 if is_v1 else _V2
        self._limits: tuple[int, int, float] | None = None
        self._held_before = 0

    @property
    def join_paths(self) -> list[str]:
        """Return the files into which a process writes 0 to join."""
        return sorted({str(folder / self._names.tasks) for folder in self._folders.values()})

    def set_limits(self, memory_bytes: int, processes: int, cpus: float) -> None:
        """Set the limits of the next box, and forget the memory of the last; OSError if refused."""
        if self._limits != (memory_bytes, processes, cpus):
            self._limits = None
            self._set_memory(memory_bytes)
            self._write("pids", self._names.processes, str(processes))
            if "cpu" in self._folders:
                quota = str(int(cpus * _PERIOD_US))
                self._write(
                    "cpu", self._names.processor, quota if self._is_v1 else f"{quota} 100000"
                )
            self._limits = (memory_bytes, processes, cpus)
        with contextlib.suppress(OSError):  # old kernels keep the peak of a cgroup's whole life
            self._write("memory", self._names.peak, "0")
        self._held_before = self._read(self._names.usage)

    def _set_memory(self, num_bytes: int) -> None:
        """Bound memory, and memory with swap where the machine counts that."""
        swap = self._folders["memory"] / self._names.swap
        if self._is_v1 and swap.exists():
            with contextlib.suppress(OSError):  # refused below the present bound without swap
                swap.write_text(str(num_bytes))
        self._write("memory", self._names.memory, str(num_bytes))
        if swap.exists():
            swap.write_text(str(num_bytes) if self._is_v1 else "0")

    def num_memory_kills(self) -> int:
        """Return how many processes were ended for memory so far."""
        text = (self._folders["memory"] / self._names.events).read_text()
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        return int(found[1]) if found else 0

    def peak_bytes(self) -> int:
        """Return the most memory that was held since the last limits; 0 if no file tells.

        Not counted is what was held before, which is the machine's copies of runtimes' files.
        """
        return max(self._read(self._names.peak) - self._held_before, 0)

    def remove(self) -> None:
        """Remove the folders; those whose processes have not ended in time stay for a sweep."""
        deadline = time.monotonic() + _REMOVE_S
        for folder in set(self._folders.values()):
            while folder.exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)

    def _read(self, name: str) -> int:
        path = self._folders["memory"] / name
        return int(path.read_text()) if path.exists() else 0

    def _write(self, controller: str, name: str, text: str) -> None:
        (self._folders[controller] / name).write_text(text)


def make_cgroup(mount: Path = _MOUNT, of_self: Path = Path("/proc/self/cgroup")) -> Cgroup | None:
    """Make a cgroup below that of this process; None where this user cannot."""
    name = f"{_PREFIX}{os.getpid()}_{next(_counter)}"
    places = _find_folders(mount, of_self.read_text() if of_self.exists() else "")
    if not {"memory", "pids"} <= places.keys():
        return None
    is_v1 = places["memory"] != places["pids"]
    try:
        if not is_v1:
            _hand_down(places["memory"], " ".join(f"+{name}" for name in sorted(places)))
        folders = {controller: place / name for controller, place in places.items()}
        for place in set(places.values()):
            _sweep(place)
            (place / name).mkdir()
        cgroup = Cgroup(folders, is_v1)
        cgroup.set_limits(1 << 30, 64, 1.0)
    except OSError:  # not ours to write: another user's, or a container's read-only mount
        for place in set(places.values()):
            with contextlib.suppress(OSError):
                (place / name).rmdir()
        return None
    return cgroup


def _hand_down(place: Path, controllers: str) -> None:
    """Let cgroups below `place` bound their processes. Raises OSError if this is refused.

    controllers   as cgroup.subtree_control takes them

    Version 2 has processes only where nothing is handed down, its root apart. So this process
    moves into a cgroup of its own below; if others stay behind it moves back.
    """
    control = place / "cgroup.subtree_control"
    try:
        control.write_text(controllers)
        return
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
    own = place / f"{_OWN}{os.getpid()}"
    own.mkdir(exist_ok=True)
    try:
        (own / "cgroup.procs").write_text(str(os.getpid()))
        control.write_text(controllers)
    except OSError:
        (place / "cgroup.procs").write_text(str(os.getpid()))
        own.rmdir()
        raise


def _find_folders(mount: Path, of_self: str) -> dict[str, Path]:
    """Return the folder of this process for each controller that is there."""
    places = {}
    for line in of_self.splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",") if controllers else []
        root = mount / (controllers or "")
        if not controllers:
            listed = root / path.lstrip("/") / "cgroup.controllers"
            names = listed.read_text().split() if listed.exists() else []
        for name in {"memory", "pids", "cpu"} & set(names):
            folder = root / path.lstrip("/")
            if folder.name.startswith(_OWN):
                folder = folder.parent
            # A container may show its own cgroup as the root, and the host's path to it.
            places[name] = folder if folder.is_dir() else root
    return places


def _sweep(place: Path) -> None:
    """Remove cgroups whose makers have ended."""
    for folder in (*place.glob(f"{_PREFIX}*"), *place.glob(f"{_OWN}*")):
        pid = folder.name.removeprefix(_PREFIX).removeprefix(_OWN).split("_")[0]
        if not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()
