"""Reads the state of the InfiniBand or RoCE adapters from /sys, and what they need of limits."""

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok, warning
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
        return [failed("infiniband", f"no port is active: {down}", remedy, **figures)]
    found = []
    if not list((root / "dev/infiniband").glob("uverbs*")):
        text = f"{len(active)} active ports, but this process sees no /dev/infiniband/uverbs*"
        remedy = "give the container the devices: docker run --device /dev/infiniband"
        found.append(failed("infiniband", text, remedy, **figures))
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < LEAST_MEMLOCK and not _may_lock():
        text = f"locked memory is limited to {limit >> 10} KiB; adapters read locked memory alone"
        remedy = (
            "ulimit -l unlimited; docker run --ulimit memlock=-1; SLURM: PropagateResourceLimits"
        )
        found.append(failed("infiniband", text, remedy, memlock_kib=limit >> 10))
    if found:
        return found
    text = f"{len(active)} active: " + ", ".join(f"{p.name} {p.rate}" for p in active)
    if down:
        return [warning("infiniband", f"{text}; not active: {down}", "see `ibstat`", **figures)]
    return [ok("infiniband", text, **figures)]
