"""Compares the GPUs of this machine with those of the recipe, and shows how they are linked."""

import os
from collections import Counter

from mcore_rl.device import inventory
from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok, warning
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

BUSY_MIB = 1024
"""More memory than this in use is another process, not the driver."""


def check_gpus(needs: MachineNeeds) -> list[Finding]:
    """Which GPUs there are, whether they suffice and are free."""
    if not inventory.has_driver():
        return [_without_gpus(needs)]
    try:
        gpus = inventory.list_gpus()
    except inventory.NoAnswerError as error:
        remedy = "repair the driver; in a container: docker run --gpus all, apptainer --nv"
        return [failed("gpus", str(error), remedy)]
    usable = inventory.num_usable_gpus()
    wanted = min(needs.gpus, needs.gpus_per_node)
    kinds = Counter(f"{gpu.name}, {gpu.memory_mib / 1024:.0f} GiB" for gpu in gpus)
    text = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    figures = {"gpus": len(gpus), "usable": usable, "driver": gpus[0].driver if gpus else ""}
    if usable < max(wanted, 1):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        text += f"; torch can use {usable} of them"
        text += f", the recipe needs {wanted} per machine" if wanted else ""
        remedy = "check that torch is a CUDA build, or take a recipe for fewer GPUs"
        if hidden is not None:
            remedy = f"CUDA_VISIBLE_DEVICES={hidden} hides GPUs: unset it"
        return [failed("gpus", text, remedy, **figures)]
    found = [ok("gpus", f"{text}; driver {figures['driver']}", **figures)]
    if len(kinds) > 1:
        found = [warning("gpus", f"{text}: ranks wait for the slowest", "use one kind", **figures)]
    busy = [gpu for gpu in gpus if gpu.used_mib > BUSY_MIB]
    if busy:
        listed = ", ".join(f"GPU {gpu.index}: {gpu.used_mib} MiB" for gpu in busy)
        found.append(warning("gpus", f"memory is in use: {listed}", "see nvidia-smi for whose"))
    return found


def _without_gpus(needs: MachineNeeds) -> Finding:
    cores = os.cpu_count() or 1
    text = f"none; {cores} cores"
    if needs.gpus > cores:
        text += f", but the recipe starts {needs.gpus} ranks"
        remedy = "rehearse=true runs the recipe in its smallest size here"
        return warning("gpus", text, remedy, gpus=0, cores=cores)
    return ok("gpus", text, gpus=0, cores=cores)


def check_nodes(needs: MachineNeeds) -> list[Finding]:
    """Whether as many machines are checked as the recipe fills."""
    wanted = -(-needs.gpus // needs.gpus_per_node)
    if not needs.gpus or not inventory.has_driver() or needs.num_nodes >= wanted:
        return []
    text = f"{needs.num_nodes} is checked, the recipe fills {wanted} ({needs.gpus} GPUs)"
    remedy = "check all together: srun mcore-rl doctor --rendezvous <shared folder>"
    return [warning("nodes", text, remedy)]


def check_links(needs: MachineNeeds) -> list[Finding]:
    """How the GPUs are linked; a pair without NVLink beside pairs with it is named."""
    if not inventory.has_driver():
        return []
    try:
        links = inventory.gpu_links()
    except inventory.NoAnswerError as error:
        return [warning("gpu links", str(error), "see `nvidia-smi topo -m`")]
    if not links:
        return []
    kinds = Counter(links.values())
    text = ", ".join(f"{count} pairs {kind}" for kind, count in kinds.most_common())
    slow = [pair for pair, kind in links.items() if not kind.startswith("NV")]
    if slow and len(slow) < len(links):
        first, second = slow[0]
        text += f"; GPU {first} and GPU {second} have no NVLink, others do"
        remedy = "check NVLink with `nvidia-smi nvlink --status`; a fabric manager may not run"
        return [warning("gpu links", text, remedy, **kinds)]
    return [ok("gpu links", text, **kinds)]
