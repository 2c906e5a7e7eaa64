"""Gathers what a node tells the others about itself, and compares it between nodes.

The network interface is the one that collectives take, by NCCL's rules for names
(NCCL_SOCKET_IFNAME): "eth,ib" are beginnings of names, "=eth0" is a whole name, "^docker,lo"
excludes. GLOO_SOCKET_IFNAME holds whole names.
"""

import ipaddress
import os
import platform
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from mcore_rl import __version__
from mcore_rl.device import inventory
from mcore_rl.device.environment import AGREED, differences, select_forwarded
from mcore_rl.process.versions import find_versions
from mcore_rl.tools.doctor.machine.finding import Finding, fail, ok, warn
from mcore_rl.tools.doctor.machine.meeting import NodePlace
from mcore_rl.tools.doctor.machine.needs import MachineNeeds

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
LOCAL_ONLY = ("lo", "docker", "veth", "virbr", "br-", "cni", "podman")
"""How interfaces begin that other machines cannot reach."""


@dataclass(frozen=True)
class Interface:
    """A network interface as the kernel shows it; `addresses` without link-local ones."""

    name: str
    is_up: bool
    addresses: tuple[str, ...]
    mbit_per_s: int
    mtu: int

    @property
    def is_local(self) -> bool:
        return self.name.startswith(LOCAL_ONLY)


def list_interfaces() -> dict[str, Interface]:
    """Return name -> interface, IPv4 addresses first."""
    stats = psutil.net_if_stats()
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [e.address for e in entries if e.family == socket.AF_INET]
        for entry in entries:
            address = entry.address.partition("%")[0]
            if entry.family == socket.AF_INET6 and not ipaddress.ip_address(address).is_link_local:
                addresses.append(address)
        state = stats.get(name)
        is_up = state is not None and state.isup
        speed, mtu = (state.speed, state.mtu) if state is not None else (0, 0)
        found[name] = Interface(name, is_up, tuple(addresses), speed, mtu)
    return found


def choose_interface(
    needs: MachineNeeds, environ: Mapping[str, str], interfaces: Mapping[str, Interface]
) -> tuple[Interface | None, str]:
    """Return the interface that is chosen by name, and by what; by the default route if by nothing.

    None stands for a name that no interface has.
    """
    chosen = {"--interface": f"={needs.interface}"} if needs.interface else {}
    for variable in VARIABLES:
        if environ.get(variable):
            exact = "=" if variable == "GLOO_SOCKET_IFNAME" else ""
            chosen[variable] = exact + environ[variable]
    for source, names in chosen.items():
        matching = [face for face in interfaces.values() if _matches(face.name, names)]
        # An excluding list leaves interfaces that are down, too.
        matching.sort(key=lambda face: (face.is_local, not (face.is_up and face.addresses)))
        return (matching[0] if matching else None), f"{source}={names.removeprefix('=')}"
    address = find_own_address()
    by_route = [face for face in interfaces.values() if address in face.addresses]
    return (by_route[0] if by_route else interfaces.get("lo")), "the default route"


def _matches(name: str, names: str) -> bool:
    mode, listed = names[:1], names.lstrip("^=").split(",")
    if mode == "=":
        return name in listed
    return name.startswith(tuple(listed)) != (mode == "^")


def find_own_address() -> str:
    """Return the address from which packets to other networks leave, or 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documents; no packet is sent
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def check_interface(needs: MachineNeeds) -> list[Finding]:
    """Whether the interface exists, is up, has an address and is one that others can reach."""
    interfaces = list_interfaces()
    face, source = choose_interface(needs, os.environ, interfaces)
    good = [f.name for f in interfaces.values() if f.is_up and f.addresses and not f.is_local]
    remedy = f"choose one of {', '.join(good) or 'none here'}: NCCL_SOCKET_IFNAME=<name> and"
    remedy += " GLOO_SOCKET_IFNAME=<name>, the same on every node"
    if face is None:
        text = f"{source}: no such interface; there are {', '.join(interfaces)}"
        return [fail("interface", text, remedy)]
    figures = {"interface": face.name, "mbit_per_s": face.mbit_per_s, "mtu": face.mtu}
    if not face.is_up:
        return [fail("interface", f"{face.name} (by {source}) is down", remedy, **figures)]
    if not face.addresses:
        return [fail("interface", f"{face.name} (by {source}) has no address", remedy, **figures)]
    text = f"{face.name} {face.addresses[0]} (by {source})"
    if face.is_local and needs.num_nodes > 1:
        return [fail("interface", f"{text}: other nodes do not reach it", remedy, **figures)]
    named = {os.environ[name].lstrip("=") for name in VARIABLES if os.environ.get(name)}
    if len(named) > 1:
        text += f", but {' and '.join(f'{v}={os.environ.get(v)}' for v in VARIABLES)}"
        return [warn("interface", text, "set both to the same name", **figures)]
    speed = f", {face.mbit_per_s / 1000:g} Gbit/s" if face.mbit_per_s else ""
    return [ok("interface", text + speed, **figures)]


def check_hostname(needs: MachineNeeds) -> list[Finding]:
    """Whether this machine's name leads to one of its addresses; other nodes must not get lo's."""
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        text = f"{name} does not resolve ({error.strerror})"
        remedy = "add it to /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME"
        return [warn("hostname", text, remedy)]
    addresses = sorted({str(entry[4][0]) for entry in found})
    text = f"{name} is {', '.join(addresses)}"
    own = {a for face in list_interfaces().values() for a in face.addresses}
    loops = [a for a in addresses if a.startswith("127.")]
    if loops and needs.num_nodes > 1:
        remedy = "take the name off the 127.* line of /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return [warn("hostname", f"{text}: a peer would be sent to itself", remedy)]
    if not loops and not own.intersection(addresses):
        return [warn("hostname", f"{text}, which is not this machine", "correct DNS or /etc/hosts")]
    return [ok("hostname", text)]


@dataclass(frozen=True)
class NodeFacts:
    """A node as the others see it; `environ` holds the variables that a run forwards."""

    name: str
    host: str
    address: str
    interface: str
    versions: Mapping[str, str]
    environ: Mapping[str, str]
    gpus: Sequence[str]


def gather_facts(place: NodePlace, needs: MachineNeeds) -> NodeFacts:
    face, _ = choose_interface(needs, os.environ, list_interfaces())
    address = face.addresses[0] if face and face.addresses else find_own_address()
    gpus: list[inventory.Gpu] = []
    if inventory.has_driver():
        try:
            gpus = inventory.list_gpus()
        except inventory.NoAnswerError:
            gpus = []  # the machine's own check says why
    versions = {"python": platform.python_version(), "mcore_rl": __version__}
    versions |= find_versions()
    versions |= {"cuda of torch": inventory.cuda_of_torch(), "NCCL": inventory.nccl_version()}
    if gpus:
        versions["driver"] = gpus[0].driver
    return NodeFacts(
        name=place.name,
        host=socket.gethostname(),
        address=address,
        interface=face.name if face else "",
        versions={name: version for name, version in versions.items() if version},
        environ=select_forwarded(os.environ),
        gpus=[f"{gpu.name}, {gpu.memory_mib} MiB" for gpu in gpus],
    )


def compare_facts(facts: Sequence[NodeFacts]) -> list[Finding]:
    """Return in what nodes differ: versions, environment variables, GPUs, and names used twice."""
    return [
        *_compare_names(facts),
        *_compare_versions(facts),
        *_compare_environments(facts),
        *_compare_gpus(facts),
    ]


def _compare_names(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    ranks = _group_by_value({rank: fact.name for rank, fact in enumerate(facts)})
    for name, of_name in ranks.items():
        if len(of_name) > 1:
            text = f"numbers {', '.join(map(str, of_name))} all run on {name}"
            remedy = "start one per node: srun --ntasks-per-node=1"
            yield fail("nodes", text, remedy).name_node(name)


def _compare_versions(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    differ = False
    for package in sorted({name for fact in facts for name in fact.versions}):
        versions = {rank: f.versions.get(package, "not installed") for rank, f in enumerate(facts)}
        groups = _group_by_value(versions)
        if len(groups) > 1:
            differ = True
            text = "; ".join(f"{v} on {_names(facts, ranks)}" for v, ranks in groups.items())
            remedy = f"install the same {package} on every node, or start one image on all"
            # Drivers of one CUDA generation get along; the rest is pickled or sent between nodes.
            grade = warn if package == "driver" else fail
            yield grade("same versions", f"{package} {text}", remedy)
    if not differ:
        yield ok("same versions", f"the same packages on {len(facts)}")


def _compare_environments(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    first = facts[0]
    differ: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, fact in enumerate(facts):
        for variable, how in differences(first.environ, fact.environ).items():
            differ[variable, how].append(rank)
    for (variable, how), ranks in differ.items():
        text = f"{variable} is {how} of {first.name} on {_names(facts, ranks)}"
        remedy = f"set {variable} alike on every node, or unset it"
        grade = fail if variable in AGREED else warn
        yield grade("same environment", text, remedy)
    if not differ:
        yield ok("same environment", f"the same variables on {len(facts)}")


def _compare_gpus(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    groups = _group_by_value({rank: "; ".join(fact.gpus) for rank, fact in enumerate(facts)})
    if len(groups) > 1:
        text = "; ".join(f"{v or 'none'} on {_names(facts, ranks)}" for v, ranks in groups.items())
        yield warn("same gpus", text, "take nodes of one kind: the slowest sets the pace")


def _group_by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        groups[value].append(rank)
    return groups


def _names(facts: Sequence[NodeFacts], ranks: Sequence[int]) -> str:
    shown = [facts[rank].name for rank in ranks[:4]]
    more = f" and {len(ranks) - len(shown)} others" if len(ranks) > len(shown) else ""
    return ", ".join(shown) + more
