"""Runs in each SGLang rank: receives versions of adapters that the engine serves.

    each version   A, B, whole, of every matrix --> memory of the link's own --> SGLang's adapters

They come while the engine decodes, and are installed between two of its steps.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mcore_rl.weight_sync.adapter.engine import STAMP_TENSOR, allocate
from mcore_rl.weight_sync.adapter.serving import Install
from mcore_rl.weight_sync.connection import DestinationCheck, EngineConnection, SentSums
from mcore_rl.weight_sync.execute import PlanExecutor
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import AdapterRequest, Report
from mcore_rl.weights.box import Shape, Shard
from mcore_rl.weights.layouts.layout import HfTensors
from mcore_rl.weights.lora.places import (
    FIRST,
    STAMP,
    AdapterStamp,
    list_factor_shapes,
    make_stamp_shard,
    make_whole_factors,
)
from mcore_rl.weights.lora.served import make_engine_config, make_engine_factors
from mcore_rl.weights.lora.whole import check_factor_shapes


class ServedAdapters:
    """The adapters that one engine rank receives over a link, by name."""

    def __init__(
        self, connection: EngineConnection, shapes: Mapping[str, Shape], install: Install
    ) -> None:
        """`shapes`: of all weights of the model, by the names of HF tensors."""
        self._connection = connection
        self._install = install
        self._shapes = shapes
        self._received: dict[str, _ReceivedAdapter] = {}

    @torch.no_grad()
    def stage(self, version: int, request: AdapterRequest) -> Report:
        """Receive the factors of `version`; open the link first if the request brings one.

        Raises TransferError or ValueError if they are not what the engine was linked for.
        """
        name = request.name
        if request.factors_link is not None:
            self._drop(name)
            self._received[name] = _ReceivedAdapter(self._connection, request, self._shapes)
        if name not in self._received:
            raise TransferError(
                f"{self._connection.end.name} has no link for adapter {name!r}: link it anew"
            )
        return self._received[name].receive(version, request.stamp)

    def install(self, name: str, version: int, *, verify: bool) -> None:
        """Serve `version` of an adapter from now on; call it between two steps of the engine.

        Raises TransferError if another version was received last, or SGLang does not take it.
        """
        received = self._received.get(name)
        if received is None or received.version != version:
            held = None if received is None else received.version
            raise TransferError(
                f"version {version} of adapter {name!r} is to be installed, but {held} was received"
            )
        if verify:
            received.check(version)
        self._install(name, version, *received.make_adapter())

    def close(self) -> None:
        """Leave the links; SGLang keeps the adapters."""
        for name in list(self._received):
            self._drop(name)

    def _drop(self, name: str) -> None:
        received = self._received.pop(name, None)
        if received is not None:
            received.executor.close()


class _ReceivedAdapter:
    """A link for the factors of one adapter, and those that came last."""

    def __init__(
        self, connection: EngineConnection, request: AdapterRequest, shapes: Mapping[str, Shape]
    ) -> None:
        link = request.factors_link
        assert link is not None, "a link to open"
        self._shapes = shapes
        self._factors: dict[str, Tensor] = {}
        self._names: dict[str, str] = {}
        """Name of each factor, by the local tensor that holds it."""
        self._stamp = request.stamp
        self._device = connection.end.device
        rank = link.num_senders + connection.end.side_rank
        end = LinkEnd.open(link, rank, self._device)
        self.executor = PlanExecutor.meet(end, self._plan, connection.make_transport)
        self.version: int | None = None
        """The version that the factors are of, once they are complete."""
        self._sent: SentSums | None = None
        plan = self.executor.plan
        self._destination = DestinationCheck(end, plan.buckets, plan.sums)

    def receive(self, version: int, wanted: AdapterStamp) -> Report:
        executor = self.executor
        began_s = time.monotonic()
        self.version = None
        before = self._sent
        sums = executor.execute(version, self._factors, began_s + executor.end.link.timeout_s)
        report = executor.make_report(began_s)
        stamp = AdapterStamp.decode(self._factors[STAMP_TENSOR].tolist())
        wanted.refuse_other(stamp, f"version {version}")
        self._stamp = stamp
        self._sent = SentSums.join(version, sums)
        self.version = version
        changed = None if before is None else self._sent.count_changed(before)
        return replace(report, num_slices=len(self._sent.sums_P), num_changed=changed)

    def check(self, version: int) -> None:
        """Raise TransferError unless the factors have the checksums that they were sent with."""
        self._destination.check(version, self._factors, self._sent)

    def make_adapter(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the adapter's configuration and copies of its factors, as SGLang takes them."""
        factors = {key: self._factors[tensor] for tensor, key in self._names.items()}
        matrices = {key[: -len(FIRST)] for key in factors}
        config = make_engine_config(matrices, self._stamp.rank, self._stamp.scale)
        return config, make_engine_factors(factors, self._shapes)

    def _plan(self, tensors: HfTensors) -> list[Shard]:
        """Return this rank's shards of the factors, given all that the trainer ranks hold."""
        found = {name: shape for name, (shape, _) in tensors.items() if name != STAMP}
        matrices = {key[: -len(FIRST)]: self._shapes.get(key[: -len(FIRST)]) for key in found}
        known = {name: shape for name, shape in matrices.items() if shape is not None}
        rank, num_matrices = self._stamp.rank, self._stamp.num_matrices
        check_factor_shapes(found, list_factor_shapes(known, rank), "the trainer's adapter")
        if len(known) != num_matrices:
            raise ValueError(
                f"the trainer's adapter has factors of {len(known)} matrices, and the recipe adapts"
                f" {num_matrices}: shards of it were dropped"
            )
        shards = [make_stamp_shard(STAMP_TENSOR)]
        for number, (name, shape) in enumerate(known.items()):
            own = f"{number}.A", f"{number}.B"
            dtype = tensors[name + FIRST][1]
            shards += make_whole_factors(name, shape, rank, own, dtype)
        self._names = {shard.tensor: shard.box.name for shard in shards[1:]}
        self._factors = allocate(shards, self._device)
        return shards
