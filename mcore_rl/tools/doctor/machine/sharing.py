"""Checks memory and folders that processes share: /dev/shm, and the folder where nodes meet.

/dev/shm is compared with Ray's object store and with what collectives put there. The nodes' folder
must be one folder: what one node writes the others read, and a lock excludes the others.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.device.inventory import has_driver
from mcore_rl.process.file_lock import LockedError, hold_lock
from mcore_rl.tools.doctor.machine.clock import TimeSample
from mcore_rl.tools.doctor.machine.finding import Finding, fail, ok, warn
from mcore_rl.tools.doctor.machine.meeting import Meeting
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

OTHERS_MIB = 256
"""Besides the object store: what NCCL and SGLang put there for processes of one machine."""


def check_shared_memory(needs: MachineNeeds, folder: Path = Path("/dev/shm")) -> list[Finding]:
    """Whether /dev/shm has room for Ray's object store; a full one kills processes by SIGBUS."""
    stats = os.statvfs(folder)
    size_mib = stats.f_blocks * stats.f_frsize >> 20
    free_mib = stats.f_bavail * stats.f_frsize >> 20
    store_mib = needs.object_store_mib
    if store_mib is None:
        store_mib = 8192 if has_driver() else 512  # what mcore_rl/cluster/session.py takes
    wanted_mib = store_mib + OTHERS_MIB
    text = f"{folder}: {free_mib} of {size_mib} MiB free"
    figures = {"size_mib": size_mib, "free_mib": free_mib, "wanted_mib": wanted_mib}
    if free_mib >= wanted_mib:
        return [ok("shared memory", f"{text}, {wanted_mib} are wanted", **figures)]
    text += f", but {wanted_mib} are wanted: {store_mib} of cluster.object_store_mib and"
    text += f" {OTHERS_MIB} for collectives"
    remedy = f"docker run --ipc host, or --shm-size {wanted_mib}m; mount -o remount,size=<size>"
    remedy += (
        f" {folder}; remove what killed processes left there, or lower cluster.object_store_mib"
    )
    return [fail("shared memory", text, remedy, **figures)]


ROUNDS = 3
CONTENT_BYTES = 65536
SLOW_S = 5.0
"""A round trip that takes longer means that clients keep old views of the folder."""


@dataclass(frozen=True)
class SharedView:
    """The view that node 0 has of the others: seconds of their round trips, and their clocks.

    `wrong` says of a node, by rank, that content came differently.
    """

    seconds: dict[int, list[float]]
    samples: dict[int, list[TimeSample]]
    wrong: dict[int, str]


def call_and_answer(meeting: Meeting, clock: Callable[[], float] = time.time) -> SharedView:
    """Have node 0 write random content and all others answer with its checksum, some times over."""
    view = SharedView({}, {}, {})
    for number in range(ROUNDS):
        if meeting.place.rank == 0:
            _call(meeting, number, clock, view)
        else:
            _answer(meeting, number, clock)
    return view


def _call(meeting: Meeting, number: int, clock: Callable[[], float], view: SharedView) -> None:
    content = os.urandom(CONTENT_BYTES).hex()
    began_s = time.monotonic()
    sent_s = clock()
    meeting.put(f"call{number}_0", content)
    names = [f"answer{number}_{rank}" for rank in range(1, meeting.place.size)]
    for name, answer in meeting.arrivals(names, "an answer"):
        seconds, received_s = time.monotonic() - began_s, clock()
        rank = int(name.rpartition("_")[2])
        view.seconds.setdefault(rank, []).append(seconds)
        view.samples.setdefault(rank, []).append(TimeSample(sent_s, answer["time"], received_s))
        if answer["read"] != _sum(content):
            view.wrong[rank] = "it read something else than node 0 wrote"
        if answer["sum"] != _sum(answer["content"]):
            view.wrong[rank] = "node 0 read something else than it wrote"


def _answer(meeting: Meeting, number: int, clock: Callable[[], float]) -> None:
    [content] = meeting.take([f"call{number}_0"], "a call")
    own = os.urandom(CONTENT_BYTES).hex()
    answer = {"read": _sum(content), "time": clock(), "content": own, "sum": _sum(own)}
    meeting.put(f"answer{number}_{meeting.place.rank}", answer)


def _sum(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def try_lock(meeting: Meeting) -> list[bool]:
    """Have node 0 hold a lock; return by rank whether each other node was refused it meanwhile."""
    path = meeting.folder / "lock"
    if meeting.place.rank == 0:
        with hold_lock(path):
            meeting.put("locked_0", True)
            return [True, *_list_refusals(meeting)]
    meeting.take(["locked_0"], "a lock")
    refused = False
    try:
        with hold_lock(path):
            pass
    except LockedError:
        refused = True
    meeting.put(f"refused_{meeting.place.rank}", refused)
    return [True, *_list_refusals(meeting)]


def _list_refusals(meeting: Meeting) -> list[bool]:
    names = [f"refused_{rank}" for rank in range(1, meeting.place.size)]
    return meeting.take(names, "the outcome of its lock")


def judge_sharing(view: SharedView, refused: list[bool], names: list[str]) -> list[Finding]:
    """Return the findings of node 0 about the folder, each with the name of the other node."""
    found = []
    for rank in range(1, len(names)):
        slowest_s = max(view.seconds[rank])
        figures = {"round_trip_s": round(slowest_s, 3)}
        text = f"written and answered in {slowest_s:.3f} s"
        if rank in view.wrong:
            remedy = "do not use this filesystem for runs; look at the clients' mount options"
            finding = fail("shared folder", view.wrong[rank], remedy, **figures)
        elif slowest_s > SLOW_S:
            remedy = "mount it with actimeo=1 or noac, so that nodes see new files soon"
            finding = warn("shared folder", text, remedy, **figures)
        else:
            finding = ok("shared folder", text, **figures)
        found.append(finding.name_node(names[rank]))
        if refused[rank]:
            found.append(
                ok("shared lock", f"refused while {names[0]} holds it").name_node(names[rank])
            )
        else:
            text = f"got the lock that {names[0]} holds"
            remedy = "mount with flock across nodes (Lustre: -o flock, not localflock), or make"
            remedy += " sure that no two commands use one run folder"
            found.append(fail("shared lock", text, remedy).name_node(names[rank]))
    return found
