"""Has the ranks of another layout take over the states of all earlier ranks, lost ones included.

earlier ranks' copies           on the node of rank x              rank x
on their nodes and partners --> those that x needs, by the --> composes its own copy,
                                indexes of both sides              and goes back to it
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mcore_rl.cluster.state_keepers import Copy, StateKeepers
from mcore_rl.config import ParallelConfig
from mcore_rl.planning.smaller_layout import find_namesake
from mcore_rl.process.kept_copies import Span, decode_index, plan_reads
from mcore_rl.process.kept_memory import NUM_COPIES


@dataclass(frozen=True)
class EarlierRanks:
    """Ranks that those of another layout replace: their layout, and their names by rank."""

    parallel: ParallelConfig
    names: tuple[str, ...]


@dataclass(frozen=True)
class NewRanks:
    """The ranks of the new layout; by rank, their nodes and the indexes of their copies."""

    parallel: ParallelConfig
    nodes: Sequence[str]
    indexes: Sequence[bytes]


@dataclass(frozen=True)
class _Taker:
    """A new rank: its node, what its copies hold, and the earlier rank with its coordinates."""

    node: str
    index: Sequence[Span]
    namesake: str


class CallEach(Protocol):
    """Calls a method on all new ranks, with arguments by rank, and returns their answers."""

    def __call__(self, method: str, args_per_rank: Sequence[Sequence[object]], /) -> list[Any]: ...


def take_over(
    candidates: Sequence[EarlierRanks],
    ranks: NewRanks,
    keepers: StateKeepers,
    call_each: CallEach,
) -> list[list[int]]:
    """Have the new ranks compose their copies of each step that all earlier ranks' copies have.

    candidates   several if a second loss came before the states of a layout lay on partner nodes;
                 of those with the newest whole step, the last one counts
    Returns, for each step in order, the number of the copy by rank; [] if there is no such step.
    """
    found = [_find_steps(keepers.list_copies(earlier.names)) for earlier in candidates]
    newest = max(range(len(found)), key=lambda k: (max(found[k], default=-1), k))
    takers = _list_takers(candidates[newest], ranks)
    made = []
    for step, copies in found[newest].items():
        held = {name: keepers.read_index(copy) for name, copy in copies.items()}
        needed = [_find_needed(taker, copies, held) for taker in takers]
        paths = _bring(takers, needed, copies, keepers)
        arguments = [
            (step, {name: paths[taker.node][name] for name in names}, taker.namesake)
            for taker, names in zip(takers, needed, strict=True)
        ]
        made.append(call_each("compose_state", arguments))
    return made


def _find_steps(copies: Mapping[str, Mapping[int, Copy]]) -> dict[int, dict[str, Copy]]:
    """Return the newest steps that all ranks have a copy of, with these copies.

    A partner may have older ones, which count no longer.
    """
    steps = sorted(set.intersection(*(set(of_rank) for of_rank in copies.values())))
    return {step: {name: copies[name][step] for name in copies} for step in steps[-NUM_COPIES:]}


def _list_takers(earlier: EarlierRanks, ranks: NewRanks) -> list[_Taker]:
    takers = []
    for rank, (node, index) in enumerate(zip(ranks.nodes, ranks.indexes, strict=True)):
        namesake = find_namesake(earlier.parallel, ranks.parallel, rank)
        takers.append(_Taker(node, decode_index(index), earlier.names[namesake]))
    return takers


def _find_needed(
    taker: _Taker, copies: Mapping[str, Copy], held: Mapping[str, Sequence[Span]]
) -> list[str]:
    """Return the earlier ranks whose copies a new rank needs, those on its node first."""
    nearest = sorted(copies, key=lambda name: copies[name].node != taker.node)
    reads = plan_reads(taker.index, {name: held[name] for name in nearest})
    used = {read.source for read in reads} | {taker.namesake}
    return [name for name in nearest if name in used]


def _bring(
    takers: Sequence[_Taker],
    needed: Sequence[Sequence[str]],
    copies: Mapping[str, Copy],
    keepers: StateKeepers,
) -> dict[str, dict[str, str]]:
    """Return by node and earlier rank the path of each copy that a new rank there needs."""
    by_node: dict[str, set[str]] = {}
    for taker, names in zip(takers, needed, strict=True):
        by_node.setdefault(taker.node, set()).update(names)
    return {
        node: keepers.bring({name: copies[name] for name in sorted(names)}, node)
        for node, names in by_node.items()
    }
