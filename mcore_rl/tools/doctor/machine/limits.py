"""Reads the limits of this process: open files, processes, locked memory, and huge pages."""

import re
import resource
from pathlib import Path

from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok, warning
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

FILES = (1024, 65536)
"""Fewer open files than the first do not do: each rank and engine holds a socket to every peer.
With fewer than the second, Ray warns, and runs of many nodes stop."""
PROCESSES = (1024, 8192)
"""A machine of eight ranks and engines starts some thousand threads."""


def check_limits(needs: MachineNeeds) -> list[Finding]:
    """Whether ulimits, and the limit of a container, let a run open files and start threads."""
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = [_graded("open files", files, FILES, _raise_files(files_hard))]
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    remedy = "ulimit -u unlimited, or nproc in /etc/security/limits.conf"
    found.append(_graded("processes", processes, PROCESSES, remedy))
    pids = _pids_of_container(Path("/sys/fs/cgroup"))
    if pids is not None:
        found.append(_graded("container pids", pids, PROCESSES, "docker run --pids-limit -1"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB"
    found.append(ok("locked memory", text))  # InfiniBand asks for more: infiniband.py
    return found


def _graded(check: str, limit: int, bounds: tuple[int, int], remedy: str) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return ok(check, "unlimited")
    least, enough = bounds
    if limit < least:
        return failed(check, f"at most {limit}, a run needs {least}", remedy, limit=limit)
    if limit < enough:
        text = f"at most {limit}; runs of several machines need {enough}"
        return warning(check, text, remedy, limit=limit)
    return ok(check, f"at most {limit}", limit=limit)


def _raise_files(hard: int) -> str:
    if hard == resource.RLIM_INFINITY or hard >= FILES[1]:
        return f"ulimit -n {FILES[1]}; docker run --ulimit nofile={FILES[1]}"
    return f"the hard limit is {hard}: raise nofile in /etc/security/limits.conf to {FILES[1]}"


def _pids_of_container(cgroup: Path) -> int | None:
    """The most processes of this control group, or None if it has no such limit."""
    try:
        text = (cgroup / "pids.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def check_huge_pages(needs: MachineNeeds, root: Path = Path("/")) -> list[Finding]:
    """How the kernel gives huge pages, which large host copies of weights are read through."""
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    try:
        setting = path.read_text().strip()
    except OSError as error:
        return [ok("huge pages", f"the kernel does not say ({error.strerror})")]
    chosen = re.search(r"\[(\w+)\]", setting)
    word = chosen[1] if chosen else setting
    if word == "never":
        remedy = f"echo madvise > {path} makes copies of large host memory cheaper"
        return [warning("huge pages", "transparent huge pages: never", remedy)]
    return [ok("huge pages", f"transparent huge pages: {word}")]
