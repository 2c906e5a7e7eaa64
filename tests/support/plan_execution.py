"""Executes the plans of all ranks on numbered tensors and counts where each element ends up."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mcore_rl.weights.layouts.layout import Layout, list_boxes
from mcore_rl.weights.plan.local import Flow, plan_recvs, plan_sends
from mcore_rl.weights.plan.shared_region import SplitGranularity
from mcore_rl.weights.plan.shares import Topology

Weights = Mapping[str, NDArray[np.int64]]
MISSING = -1


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """No two elements, of any two tensors, are equal."""
    weights, first = {}, 0
    for name, shape in shapes.items():
        numel = int(np.prod(shape))
        weights[name] = np.arange(first, first + numel, dtype=np.int64).reshape(shape)
        first += numel
    return weights


class Memory:
    """The HF tensors as one rank has them so far, and how often each element was written."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.values: dict[str, NDArray[np.int64]] = {}
        self.counts: dict[str, NDArray[np.int64]] = {}

    def write(self, name: str, where: tuple[slice, ...], values: NDArray[np.int64]) -> None:
        if name not in self.values:
            self.values[name] = np.full_like(self._weights[name], MISSING)
            self.counts[name] = np.zeros_like(self._weights[name])
        self.values[name][where] = values
        self.counts[name][where] += 1

    def read(self, name: str, where: tuple[slice, ...]) -> NDArray[np.int64]:
        assert name in self.values, f"{name} is sent by a rank that has nothing of it"
        values = self.values[name][where]
        assert (values != MISSING).all(), f"{name}{where} is passed on before it is there"
        return values


def execute(
    source: Layout,
    target: Layout,
    weights: Weights,
    topology: Topology,
    granularity: SplitGranularity,
    held: Layout | None = None,
) -> list[Memory]:
    """Return what each target rank has in the end.

    Fails where two ends of a flow differ, or where a rank sends what it does not hold (by `held`,
    if that is not what the plan is made of).
    """
    trainers = [_filled(held or source, rank, weights) for rank in range(source.num_ranks)]
    engines = [Memory(weights) for _ in range(target.num_ranks)]
    sends = [
        plan_sends(rank, source, target, topology, granularity) for rank in range(source.num_ranks)
    ]
    recvs = [
        plan_recvs(rank, source, target, topology, granularity) for rank in range(target.num_ranks)
    ]
    _move(trainers, engines, sends, recvs)
    return engines


def check(target: Layout, weights: Weights, engines: list[Memory]) -> None:
    """Fail unless every element that a rank wants was written once, and no other."""
    for rank, memory in enumerate(engines):
        wanted = defaultdict(lambda: 0)
        for box, _ in list_boxes(target, rank):
            where = tuple(map(slice, box.start, box.stop))
            assert box.name in memory.values, f"rank {rank} was sent nothing of {box.name}"
            assert (memory.counts[box.name][where] == 1).all(), (
                f"rank {rank}: {box} not written exactly once"
            )
            assert (memory.values[box.name][where] == weights[box.name][where]).all(), (
                f"rank {rank}: {box}"
            )
            wanted[box.name] += box.numel
        for name, counts in memory.counts.items():
            assert counts.sum() == wanted[name], (
                f"rank {rank} was sent more of {name} than it wants"
            )


def _filled(layout: Layout, rank: int, weights: Weights) -> Memory:
    memory = Memory(weights)
    for box, _ in list_boxes(layout, rank):
        where = tuple(map(slice, box.start, box.stop))
        memory.write(box.name, where, weights[box.name][where])
    return memory


def _move(
    senders: list[Memory],
    receivers: list[Memory],
    sends: list[tuple[Flow, ...]],
    recvs: list[tuple[Flow, ...]],
) -> None:
    sent = {(rank, flow.peer): flow for rank, flows in enumerate(sends) for flow in flows}
    got = {(flow.peer, rank): flow for rank, flows in enumerate(recvs) for flow in flows}
    assert sent.keys() == got.keys(), sent.keys() ^ got.keys()
    for (sender, receiver), flow in sent.items():
        assert flow.digest == got[sender, receiver].digest, (sender, receiver)
        assert flow.num_bytes > 0, (sender, receiver)
        for piece in flow.slices:
            where = tuple(map(slice, piece.box.start, piece.box.stop))
            values = senders[sender].read(piece.box.name, where)
            receivers[receiver].write(piece.box.name, where, values)
