"""Compares /dev/shm with Ray's object store and with what collectives put there."""

import os
from pathlib import Path

from mcore_rl.device.inventory import has_driver
from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok
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
    return [failed("shared memory", text, remedy, **figures)]
