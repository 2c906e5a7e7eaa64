"""Gathers what a node tells the others about itself, and compares it between nodes."""

import os
import platform
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl import __version__
from mcore_rl.device import inventory
from mcore_rl.device.environment import AGREED, differences, forwarded
from mcore_rl.process.versions import installed_versions
from mcore_rl.tools.doctor.machine.finding import Finding, failed, ok, warning
from mcore_rl.tools.doctor.machine.needs import MachineNeeds
from mcore_rl.tools.doctor.machine.network import choose_interface, list_interfaces, own_address
from mcore_rl.tools.doctor.machine.places import NodePlace


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
    address = face.addresses[0] if face and face.addresses else own_address()
    gpus: list[inventory.Gpu] = []
    if inventory.has_driver():
        try:
            gpus = inventory.list_gpus()
        except inventory.NoAnswerError:
            gpus = []  # the machine's own check says why
    versions = {"python": platform.python_version(), "mcore_rl": __version__}
    versions |= installed_versions()
    versions |= {"cuda of torch": inventory.cuda_of_torch(), "NCCL": inventory.nccl_version()}
    if gpus:
        versions["driver"] = gpus[0].driver
    return NodeFacts(
        name=place.name,
        host=socket.gethostname(),
        address=address,
        interface=face.name if face else "",
        versions={name: version for name, version in versions.items() if version},
        environ=forwarded(os.environ),
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
    ranks = _by_value({rank: fact.name for rank, fact in enumerate(facts)})
    for name, of_name in ranks.items():
        if len(of_name) > 1:
            text = f"numbers {', '.join(map(str, of_name))} all run on {name}"
            remedy = "start one per node: srun --ntasks-per-node=1"
            yield failed("nodes", text, remedy).on(name)


def _compare_versions(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    differ = False
    for package in sorted({name for fact in facts for name in fact.versions}):
        versions = {rank: f.versions.get(package, "not installed") for rank, f in enumerate(facts)}
        groups = _by_value(versions)
        if len(groups) > 1:
            differ = True
            text = "; ".join(f"{v} on {_names(facts, ranks)}" for v, ranks in groups.items())
            remedy = f"install the same {package} on every node, or start one image on all"
            # Drivers of one CUDA generation get along; the rest is pickled or sent between nodes.
            grade = warning if package == "driver" else failed
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
        grade = failed if variable in AGREED else warning
        yield grade("same environment", text, remedy)
    if not differ:
        yield ok("same environment", f"the same variables on {len(facts)}")


def _compare_gpus(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    groups = _by_value({rank: "; ".join(fact.gpus) for rank, fact in enumerate(facts)})
    if len(groups) > 1:
        text = "; ".join(f"{v or 'none'} on {_names(facts, ranks)}" for v, ranks in groups.items())
        yield warning("same gpus", text, "take nodes of one kind: the slowest sets the pace")


def _by_value(values: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        groups[value].append(rank)
    return groups


def _names(facts: Sequence[NodeFacts], ranks: Sequence[int]) -> str:
    shown = [facts[rank].name for rank in ranks[:4]]
    more = f" and {len(ranks) - len(shown)} others" if len(ranks) > len(shown) else ""
    return ", ".join(shown) + more
