"""Compares several nodes: they meet in a shared folder, and node 0 makes one report of all.

facts --> shared folder and lock --> connections --> gloo, and NCCL on GPUs --> verdict
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mcore_rl.process.disk import DiskFullError, describe_filesystem
from mcore_rl.process.network import find_free_port
from mcore_rl.tools.doctor.machine.clock import TimeSample, judge_offset, measure_offset
from mcore_rl.tools.doctor.machine.facts import NodeFacts, compare_facts, gather_facts
from mcore_rl.tools.doctor.machine.finding import Finding, fail, has_failed, ok, warn
from mcore_rl.tools.doctor.machine.meeting import (
    Meeting,
    MeetingOverError,
    MissingNodesError,
    NodePlace,
)
from mcore_rl.tools.doctor.machine.needs import MachineNeeds
from mcore_rl.tools.doctor.machine.sharing import (
    SharedView,
    call_and_answer,
    judge_sharing,
    try_lock,
)
from mcore_rl.tools.doctor.machine.traffic import (
    GPU_MIB,
    MIB,
    PeerAddress,
    PeerAnswer,
    TrafficFigures,
    TrafficSpec,
    listen,
    measure_traffic,
    parse_figures,
    reach_all,
)

SLOW_GB_PER_S = 0.25
"""A link of 1 Gbit/s in both directions; less than this is a network for logins."""
OUTLIER = 0.5
"""A pair that has less than this part of the median rate is named."""


@dataclass(frozen=True)
class ClusterOutcome:
    """All findings that this node knows, whether any node's check failed, and who prints.

    shown   whether this node prints its findings: node 0, or any that did not meet the others
    """

    findings: list[Finding]
    failed: bool
    shown: bool


def check_nodes(
    folder: Path,
    place: NodePlace,
    needs: MachineNeeds,
    findings: Sequence[Finding],
    timeout_s: float,
    clock: Callable[[], float] = time.time,
) -> ClusterOutcome:
    """Compare this node, whose own findings are given, with the others that meet in `folder`."""
    try:
        with Meeting(folder, place, timeout_s) as meeting:
            if place.rank:
                return _follow(meeting, place, needs, findings, timeout_s, clock)
            found = _compare(meeting, place, needs, findings, timeout_s, clock)
            meeting.end(has_failed(found))
            return ClusterOutcome(found, has_failed(found), shown=True)
    except MissingNodesError as error:
        lost = fail("nodes", str(error), _explain_absence(folder)).name_node(place.name)
    except (OSError, DiskFullError) as error:
        text = f"the exchange with the other nodes failed: {error}"
        remedy = "give a --rendezvous that every node can write, and an interface with an address"
        lost = fail("nodes", text, remedy).name_node(place.name)
    return ClusterOutcome([*findings, lost], failed=True, shown=True)


def _explain_absence(folder: Path) -> str:
    return (
        "see whether the doctor runs there, and whether this folder is the same there: here"
        f" {describe_filesystem(folder.absolute())}"
    )


def _follow(
    meeting: Meeting,
    place: NodePlace,
    needs: MachineNeeds,
    findings: Sequence[Finding],
    timeout_s: float,
    clock: Callable[[], float],
) -> ClusterOutcome:
    """Take part as a node other than 0, and end as node 0 says."""
    # Node 0 waits for the same nodes, and reports them.
    with suppress(MeetingOverError, MissingNodesError):
        _compare(meeting, place, needs, findings, timeout_s, clock)
    return ClusterOutcome(list(findings), meeting.read_end(), shown=False)


def _compare(
    meeting: Meeting,
    place: NodePlace,
    needs: MachineNeeds,
    own: Sequence[Finding],
    timeout_s: float,
    clock: Callable[[], float],
) -> list[Finding]:
    """Go through all steps; return the findings of all nodes and about all, as node 0 sees them.

    A node that drops out ends the steps, and is the last finding.
    """
    found = list(own)
    try:
        mine = gather_facts(place, needs)
        told = meeting.exchange("facts", asdict(mine) | {"findings": [asdict(f) for f in own]})
        found = [Finding(**finding) for one in told for finding in one.pop("findings")]
        facts = [NodeFacts(**one) for one in told]
        meeting.names = names = [fact.name for fact in facts]
        found += compare_facts(facts)
        view = call_and_answer(meeting, clock)
        refused = try_lock(meeting)
        if place.rank == 0:
            found += judge_sharing(view, refused, names)
        answers = _reach(meeting, mine, clock)
        if place.rank == 0:
            found += _judge_clocks(view, answers[0], names)
        lost = judge_reach(answers, facts)
        found += lost
        if not has_failed(lost):
            found += _measure(meeting, facts, timeout_s)
    except MissingNodesError as error:
        if place.rank:
            raise
        remedy = "look at that node's output: its process ended, or its disk or network hangs"
        found.append(fail("nodes", str(error), remedy).name_node(place.name))
    return found


def _reach(meeting: Meeting, mine: NodeFacts, clock: Callable[[], float]) -> list[list[PeerAnswer]]:
    """Connect every node to every other; return each node's answers, by rank."""
    with listen(mine.address, meeting.token, meeting.place.rank, clock) as address:
        peers = [PeerAddress(**peer) for peer in meeting.exchange("addresses", asdict(address))]
        others: list[PeerAddress | None] = list(peers)
        others[meeting.place.rank] = None
        answers = reach_all(others, meeting.token, clock)
        told = meeting.exchange("answers", [asdict(answer) for answer in answers])
    return [[_take_answer(value) for value in of_node] for of_node in told]


def _take_answer(value: dict[str, Any]) -> PeerAnswer:
    return PeerAnswer(value["error"], tuple(TimeSample(**sample) for sample in value["samples"]))


def judge_reach(
    answers: Sequence[Sequence[PeerAnswer]], facts: Sequence[NodeFacts]
) -> list[Finding]:
    """Return who does not reach whom; answers are those that each node got, by rank."""
    found = []
    for rank, of_node in enumerate(answers):
        for peer, answer in enumerate(of_node):
            if answer.error:
                text = f"does not reach {facts[peer].name} at {answer.error}"
                remedy = "open the firewall between nodes, or choose another NCCL_SOCKET_IFNAME and"
                remedy += " GLOO_SOCKET_IFNAME (--interface)"
                found.append(fail("connections", text, remedy).name_node(facts[rank].name))
    faces = sorted({fact.interface for fact in facts})
    return found or [ok("connections", f"all pairs, over {', '.join(faces)}")]


def _judge_clocks(
    view: SharedView, answers: Sequence[PeerAnswer], names: Sequence[str]
) -> list[Finding]:
    found = []
    for rank in range(1, len(names)):
        offset = measure_offset([*view.samples[rank], *answers[rank].samples])
        found.append(judge_offset(offset, names[rank], names[0]).name_node(names[rank]))
    return found


def _measure(meeting: Meeting, facts: Sequence[NodeFacts], timeout_s: float) -> list[Finding]:
    """Measure the traffic over gloo and, if all nodes have GPUs, over the device's collectives."""
    found = _measure_over(meeting, facts, timeout_s, on_gpu=False)
    if all(fact.gpus for fact in facts):
        found += _measure_over(meeting, facts, timeout_s, on_gpu=True)
    return found


def _measure_over(
    meeting: Meeting, facts: Sequence[NodeFacts], timeout_s: float, *, on_gpu: bool
) -> list[Finding]:
    place, kind = meeting.place, "NCCL" if on_gpu else "gloo"
    if place.size == 1:
        return []
    host = facts[0].address
    own_port = find_free_port(host) if place.rank == 0 else 0
    port = meeting.exchange(f"port of {kind}", own_port)[0]
    mib = GPU_MIB if on_gpu else MIB
    face = facts[place.rank].interface
    spec = TrafficSpec(place.rank, place.size, host, port, face, on_gpu, mib, timeout_s)
    figures = asdict(measure_traffic(spec))
    # A process may take twice the deadline; the others' may begin later.
    told = meeting.exchange(f"traffic over {kind}", figures, 3 * timeout_s)
    return judge_traffic(kind, [parse_figures(value) for value in told], facts)


def judge_traffic(
    kind: str, figures: Sequence[TrafficFigures], facts: Sequence[NodeFacts]
) -> list[Finding]:
    """Return the findings about the rates of all pairs, and of all nodes at once."""
    broken = [
        fail(f"traffic {kind}", f"{figure.error}", _advise_on_traffic(kind)).name_node(
            facts[rank].name
        )
        for rank, figure in enumerate(figures)
        if figure.error
    ]
    if broken:
        return broken
    # Both nodes of a pair measured it; the slower of them counts.
    rates = {
        (a, b): min(rate, figures[b].pairs[a])
        for a, figure in enumerate(figures)
        for b, rate in figure.pairs.items()
        if a < b
    }
    (first, second), slowest = min(rates.items(), key=lambda pair: pair[1])
    middle, at_once = median(rates.values()), min(figure.all_to_all for figure in figures)
    shown = {
        "slowest_gb_per_s": round(slowest, 3),
        "median_gb_per_s": round(middle, 3),
        "fastest_gb_per_s": round(max(rates.values()), 3),
        "all_to_all_gb_per_s": round(at_once, 3),
    }
    text = f"pairs {slowest:.2f} to {max(rates.values()):.2f} GB/s in both directions, slowest"
    text += f" {facts[first].name} and {facts[second].name}; all to all {at_once:.2f} GB/s per node"
    name = f"traffic {kind}"
    if slowest < SLOW_GB_PER_S:
        return [warn(name, text, _advise_on_traffic(kind), **shown)]
    if len(rates) > 1 and slowest < OUTLIER * middle:
        remedy = "compare the cables, the speed and the switch of these two with the others'"
        return [warn(name, text, remedy, **shown)]
    return [ok(name, text, **shown)]


def _advise_on_traffic(kind: str) -> str:
    if kind == "NCCL":
        return "NCCL_DEBUG=INFO shows its choice; set NCCL_SOCKET_IFNAME, NCCL_IB_HCA"
    return "choose the fast network: GLOO_SOCKET_IFNAME=<name>, or --interface <name>"
