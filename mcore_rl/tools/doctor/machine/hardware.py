"""Checks the GPUs of this machine, its InfiniBand or RoCE adapters, and its container runtime."""

import os
import re
import resource
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.device import inventory
from mcore_rl.tools.doctor.machine.finding import Finding, fail, ok, warn
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

LEAST_MEMLOCK = 2**36
"""Bytes of locked memory below which registering NCCL's and DeepEP's buffers is doubtful."""

CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class AdapterPort:
    """A port of an adapter: "mlx5_0:1", "ACTIVE", "400 Gb/sec (4X NDR)"."""

    name: str
    state: str
    rate: str


def list_ports(root: Path) -> list[AdapterPort]:
    """Return the ports of all adapters under `root`/sys/class/infiniband."""
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        state, rate = ((folder / name).read_text().strip() for name in ("state", "rate"))
        name = f"{folder.parents[1].name}:{folder.name}"
        found.append(AdapterPort(name, state.rpartition(":")[2].strip(), rate))
    return found


def _may_lock() -> bool:
    """Whether CAP_IPC_LOCK lifts the limit; root in a container often lacks it."""
    found = re.search(
        r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return bool(found and int(found[1], 16) >> CAP_IPC_LOCK & 1)


def check_infiniband(needs: MachineNeeds, root: Path = Path("/")) -> list[Finding]:
    """Whether adapters are active, reachable from this process, and may lock memory."""
    ports = list_ports(root)
    if not ports:
        return [ok("infiniband", "no adapter: nodes talk over TCP")]
    active = [port for port in ports if port.state == "ACTIVE"]
    figures = {"ports": len(ports), "active": len(active)}
    down = ", ".join(f"{port.name} {port.state}" for port in ports if port not in active)
    if not active:
        remedy = "see `ibstat`; ask for cables and the subnet manager, or set NCCL_IB_DISABLE=1"
        return [fail("infiniband", f"no port is active: {down}", remedy, **figures)]
    found = []
    if not list((root / "dev/infiniband").glob("uverbs*")):
        text = f"{len(active)} active ports, but this process sees no /dev/infiniband/uverbs*"
        remedy = "give the container the devices: docker run --device /dev/infiniband"
        found.append(fail("infiniband", text, remedy, **figures))
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < LEAST_MEMLOCK and not _may_lock():
        text = f"locked memory is limited to {limit >> 10} KiB; adapters read locked memory alone"
        remedy = (
            "ulimit -l unlimited; docker run --ulimit memlock=-1; SLURM: PropagateResourceLimits"
        )
        found.append(fail("infiniband", text, remedy, memlock_kib=limit >> 10))
    if found:
        return found
    text = f"{len(active)} active: " + ", ".join(f"{p.name} {p.rate}" for p in active)
    if down:
        return [warn("infiniband", f"{text}; not active: {down}", "see `ibstat`", **figures)]
    return [ok("infiniband", text, **figures)]


DEADLINE_S = 10.0


def check_container(needs: MachineNeeds) -> list[Finding]:
    """Whether the runtime that --container names can start containers here."""
    if not needs.container:
        return []
    return [
        {"pyxis": _check_pyxis, "apptainer": _check_apptainer, "docker": _check_docker}[
            needs.container
        ]()
    ]


def _check_docker() -> Finding:
    if missing := _report_missing("docker", "install docker and NVIDIA's container toolkit"):
        return missing
    status, words = _ask("docker", "info", "--format", "{{.ServerVersion}} {{json .Runtimes}}")
    if status:
        text = f"docker's daemon does not answer: {words[-200:]}"
        remedy = "start it (systemctl start docker), or join the group docker"
        return fail("container", text, remedy)
    from mcore_rl.device.inventory import has_driver  # imports torch

    version, _, runtimes = words.partition(" ")
    if has_driver() and "nvidia" not in runtimes:
        text = f"docker {version} has no runtime for NVIDIA GPUs"
        remedy = "nvidia-ctk runtime configure --runtime=docker, then restart docker"
        return warn("container", text, remedy)
    return ok("container", f"docker {version}")


def _check_apptainer() -> Finding:
    name = "singularity" if shutil.which("singularity") else "apptainer"  # its former name
    if missing := _report_missing(name, "module load apptainer, or install it"):
        return missing
    status, words = _ask(name, "--version")
    if status:
        return fail("container", f"{name} --version: {words[-200:]}", f"install {name} again")
    return ok("container", words)


def _check_pyxis() -> Finding:
    for name in ("srun", "enroot"):
        if missing := _report_missing(name, "ask the cluster's operators for pyxis and enroot"):
            return missing
    status, words = _ask("srun", "--help")
    if status or "--container-image" not in words:
        text = "srun has no --container-image: the pyxis plugin is not loaded"
        remedy = "add pyxis to SLURM's plugstack.conf, or take --container apptainer"
        return fail("container", text, remedy)
    return ok("container", "srun with pyxis, enroot")


def _report_missing(program: str, remedy: str) -> Finding | None:
    if shutil.which(program):
        return None
    path = os.environ.get("PATH", "")
    return fail("container", f"{program} is not on PATH ({path or 'empty'})", remedy)


def _ask(*command: str) -> tuple[int, str]:
    """The exit status and output of a command; 124 if it does not answer in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return 124, f"no answer in {DEADLINE_S:g} s"
    return done.returncode, " ".join((done.stdout + done.stderr).split())


BUSY_MIB = 1024
"""More memory than this in use is another process, not the driver."""


def check_gpus(needs: MachineNeeds) -> list[Finding]:
    """Which GPUs there are, whether they suffice and are free."""
    if not inventory.has_driver():
        return [_judge_no_gpus(needs)]
    try:
        gpus = inventory.list_gpus()
    except inventory.NoAnswerError as error:
        remedy = "repair the driver; in a container: docker run --gpus all, apptainer --nv"
        return [fail("gpus", str(error), remedy)]
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
        return [fail("gpus", text, remedy, **figures)]
    found = [ok("gpus", f"{text}; driver {figures['driver']}", **figures)]
    if len(kinds) > 1:
        found = [warn("gpus", f"{text}: ranks wait for the slowest", "use one kind", **figures)]
    busy = [gpu for gpu in gpus if gpu.used_mib > BUSY_MIB]
    if busy:
        listed = ", ".join(f"GPU {gpu.index}: {gpu.used_mib} MiB" for gpu in busy)
        found.append(warn("gpus", f"memory is in use: {listed}", "see nvidia-smi for whose"))
    return found


def _judge_no_gpus(needs: MachineNeeds) -> Finding:
    cores = os.cpu_count() or 1
    text = f"none; {cores} cores"
    if needs.gpus > cores:
        text += f", but the recipe starts {needs.gpus} ranks"
        remedy = "rehearse=true runs the recipe in its smallest size here"
        return warn("gpus", text, remedy, gpus=0, cores=cores)
    return ok("gpus", text, gpus=0, cores=cores)


def check_nodes(needs: MachineNeeds) -> list[Finding]:
    """Whether as many machines are checked as the recipe fills."""
    wanted = -(-needs.gpus // needs.gpus_per_node)
    if not needs.gpus or not inventory.has_driver() or needs.num_nodes >= wanted:
        return []
    text = f"{needs.num_nodes} is checked, the recipe fills {wanted} ({needs.gpus} GPUs)"
    remedy = "check all together: srun mcore-rl doctor --rendezvous <shared folder>"
    return [warn("nodes", text, remedy)]


def check_links(needs: MachineNeeds) -> list[Finding]:
    """How the GPUs are linked; a pair without NVLink beside pairs with it is named."""
    if not inventory.has_driver():
        return []
    try:
        links = inventory.gpu_links()
    except inventory.NoAnswerError as error:
        return [warn("gpu links", str(error), "see `nvidia-smi topo -m`")]
    if not links:
        return []
    kinds = Counter(links.values())
    text = ", ".join(f"{count} pairs {kind}" for kind, count in kinds.most_common())
    slow = [pair for pair, kind in links.items() if not kind.startswith("NV")]
    if slow and len(slow) < len(links):
        first, second = slow[0]
        text += f"; GPU {first} and GPU {second} have no NVLink, others do"
        remedy = "check NVLink with `nvidia-smi nvlink --status`; a fabric manager may not run"
        return [warn("gpu links", text, remedy, **kinds)]
    return [ok("gpu links", text, **kinds)]
