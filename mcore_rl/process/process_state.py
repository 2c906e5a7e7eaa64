"""Reads from /proc why a process does nothing, and which processes of a group are stopped."""

from pathlib import Path

_WORDS = {
    "T": "is stopped (state T; SIGCONT lets it go on)",
    "t": "is held by a debugger (state t)",
    "D": "waits for a device, such as a disk or a file server (state D)",
}


def describe_state(pid: int) -> str:
    """Return words for the state of a process of this machine that does nothing, otherwise ""."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # it is gone, or this system has no /proc
        return ""
    return _WORDS.get(_fields(stat)[0], "")


def find_stopped(group_id: int) -> list[int]:
    """Return the processes of a process group that are stopped."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = _fields((folder / "stat").read_text(errors="replace"))[:3]
        except OSError:  # it ended meanwhile
            continue
        if state == "T" and int(group) == group_id:
            found.append(int(folder.name))
    return found


def _fields(stat: str) -> list[str]:
    """Return the fields after the name: state, parent, process group, ..."""
    return stat.rpartition(")")[2].split()
