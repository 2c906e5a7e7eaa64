"""Runs in each SGLang rank: keeps the weights below factors, and merges each version of factors.

    once a link    W0 -----> kept in memory of its own
    each version   A, B ---> factors ---+
                   kept W0 -------------+--> W0 + s B A --> second set of parameters --> swapped in

It always begins with W0, so rounding does not add up over versions. The other parameters are frozen
and are copied to the second set once. The factors that come when the links are opened belong to
weights that the engine has already, and so show that merging gives the trainer's bits.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mcore_rl.device import allocate_pinned_like
from mcore_rl.device.gpu_memory import DeviceStream
from mcore_rl.weight_sync.adapter.sums import collect_sums
from mcore_rl.weight_sync.connection import EngineConnection, SentSums
from mcore_rl.weight_sync.execute import PlanExecutor
from mcore_rl.weight_sync.link_end import LinkEnd
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import AdapterRequest, Link, Report
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.hf.fp8 import FP8, make_scale_box
from mcore_rl.weights.hf.low_precision import is_whole
from mcore_rl.weights.hf.quantize import quantize_into
from mcore_rl.weights.layouts.layout import HfTensors
from mcore_rl.weights.lora.places import (
    STAMP,
    AdaptedPart,
    AdapterStamp,
    list_factor_shapes,
    list_parts,
    make_stamp_shard,
)
from mcore_rl.weights.lora.product import add_product, merge_product
from mcore_rl.weights.lora.whole import check_factor_shapes

_HOST = torch.device("cpu")
STAMP_TENSOR = "stamp"


class EngineAdapter:
    """One engine rank's weights below factors, and the factors of the last version."""

    def __init__(
        self,
        connection: EngineConnection,
        shards: Sequence[Shard],
        parameters: Mapping[str, Tensor],
    ) -> None:
        """`shards` are those of `parameters`, which the engine rank serves."""
        self._connection = connection
        self._device = connection.end.device
        self._stream = DeviceStream(self._device)
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        for shard in shards:
            self._shards[shard.box.name].append(shard)
        self._parameters = parameters
        self._parts: list[AdaptedPart] = []
        self._matrices: dict[str, tuple[int, ...]] = {}
        """Shapes of all adapted matrices of the model."""
        self._base: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._executor: PlanExecutor | None = None
        self._sent: SentSums | None = None

    @torch.no_grad()
    def open(self, version: int, request: AdapterRequest, staged: Mapping[str, Tensor]) -> Report:
        """Receive the weights below the factors, and the factors of `version`.

        The engine has `version` already. Merged into `staged`, the second set of parameters, they
        must give its bits. Raises TransferError or ValueError if they don't.
        """
        base_link, factors_link = request.base_link, request.factors_link
        assert base_link is not None and factors_link is not None, "a link to open"
        began_s = time.monotonic()
        self.close()
        make_transport = self._connection.make_transport
        stamp = request.stamp
        where = self._device if request.on_gpu else _HOST
        base = PlanExecutor.meet(
            self._open_end(base_link, where),
            lambda tensors: self._plan_base(tensors, stamp, where),
            make_transport,
        )
        self._executor = PlanExecutor.meet(
            self._open_end(factors_link, self._device),
            lambda tensors: self._plan_factors(tensors, stamp),
            make_transport,
        )
        base.execute(version, self._base, began_s + base_link.timeout_s)
        num_bytes = base.num_bytes
        base.close()
        with self._stream.running():
            for name, parameter in self._parameters.items():
                staged[name].copy_(parameter.detach())
        report = self._receive(version, request, staged)
        try:
            self._connection.check_destination(version, staged)
        except TransferError as error:
            raise TransferError(
                f"the factors merged into their base are not the trainer's weights: {error}"
            ) from error
        return replace(report, num_bytes=report.num_bytes + num_bytes)

    @torch.no_grad()
    def stage(self, version: int, request: AdapterRequest, staged: Mapping[str, Tensor]) -> Report:
        """Receive the factors of `version`, and merge them into `staged`.

        Raises TransferError or ValueError if they are not what the engine was linked for, or if
        `request.verify` is set and a bit differs from the trainer's.
        """
        report = self._receive(version, request, staged)
        if request.verify:
            end, plan = self._connection.end, self._connection.plan
            sent = collect_sums(end, plan, version, time.monotonic() + end.link.timeout_s)
            self._connection.take_sent(sent)
            self._connection.check_destination(version, staged)
        return report

    def close(self) -> None:
        """Leave the link of the factors."""
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _open_end(self, link: Link, device: torch.device) -> LinkEnd:
        rank = link.num_senders + self._connection.end.side_rank
        return LinkEnd.open(link, rank, device)

    def _receive(
        self, version: int, request: AdapterRequest, staged: Mapping[str, Tensor]
    ) -> Report:
        executor = self._executor
        if executor is None:
            raise TransferError(
                f"{self._connection.end.name} has no link for factors: link it anew"
            )
        began_s = time.monotonic()
        before = self._sent
        self._sent = None
        sums = executor.execute(version, self._factors, began_s + executor.end.link.timeout_s)
        report = executor.make_report(began_s)
        stamp = AdapterStamp.decode(self._factors[STAMP_TENSOR].tolist())
        request.stamp.refuse_other(stamp, f"version {version}")
        with self._stream.running():
            for part in self._parts:
                self._merge(part, stamp.scale, staged)
        self._sent = SentSums.join(version, sums)
        changed = None if before is None else self._sent.count_changed(before)
        return replace(report, num_slices=len(self._sent.sums_P), num_changed=changed)

    def _merge(self, part: AdaptedPart, scale: float, staged: Mapping[str, Tensor]) -> None:
        base_RC = part.base.view(self._base)
        a_rC, b_Rr = part.first.view(self._factors), part.second.view(self._factors)
        served_RC = part.place.view(staged)
        if served_RC.dtype == base_RC.dtype:
            merge_product(base_RC, served_RC, a_rC, b_Rr, scale)
            return
        merged_RC = base_RC.to(self._device, copy=True)
        add_product(merged_RC, a_rC, b_Rr, scale)
        if part.place.dtype == FP8:
            quantize_into(merged_RC, served_RC, self._find_scales(part.place.box).view(staged))
        else:
            served_RC.copy_(merged_RC)

    def _plan_base(
        self, tensors: HfTensors, stamp: AdapterStamp, where: torch.device
    ) -> list[Shard]:
        """Return this rank's shards of W0 in memory `where`, given all that trainer ranks hold."""
        if len(tensors) != stamp.num_matrices:
            raise ValueError(
                f"the trainer ranks keep the weights below the factors of {len(tensors)} matrices,"
                f" and the recipe adapts {stamp.num_matrices}: shards of them were dropped"
            )
        self._matrices = {name: shape for name, (shape, _) in tensors.items()}
        dtype = next(iter(tensors.values()))[1]
        own = (shard for name in tensors for shard in self._shards.get(name, ()))
        self._parts = list_parts(own, tensors, stamp.rank, dtype)
        for part in self._parts:
            self._refuse_cut_blocks(part.place)
        shards = [part.base for part in self._parts]
        self._base = allocate(shards, where)
        return shards

    def _plan_factors(self, tensors: HfTensors, stamp: AdapterStamp) -> list[Shard]:
        """Return this rank's shards of the factors, given all that the trainer ranks hold."""
        found = {name: shape for name, (shape, _) in tensors.items() if name != STAMP}
        check_factor_shapes(
            found, list_factor_shapes(self._matrices, stamp.rank), "the trainer's adapter"
        )
        shards = [shard for part in self._parts for shard in (part.first, part.second)]
        shards.append(make_stamp_shard(STAMP_TENSOR))
        self._factors = allocate(shards, self._device)
        return shards

    def _refuse_cut_blocks(self, place: Shard) -> None:
        """Raise ValueError if a part in FP8 does not consist of whole blocks."""
        box, shape = place.box, self._matrices[place.box.name]
        if place.dtype == FP8 and not is_whole("fp8", box.start, box.stop, shape):
            raise ValueError(
                f"{self._connection.end.name} holds {box.name!r} {box.start} to {box.stop} in FP8,"
                " which cuts through blocks: set train.lora.sync=merged"
            )

    def _find_scales(self, box: Box) -> Shard:
        """Return where the scales of a part in FP8 lie."""
        scales = make_scale_box(box)
        for shard in self._shards[scales.name]:
            if shard.box.intersect(scales) == scales:
                return shard.within(scales)
        raise ValueError(f"{self._connection.end.name} holds {box} and not all of its scales")


def allocate(shards: Iterable[Shard], device: torch.device) -> dict[str, Tensor]:
    """Return a tensor for each shard, on `device`, or in pinned host memory."""
    tensors: dict[str, Tensor] = {}
    with torch.inference_mode(False):
        for shard in shards:
            dtype = getattr(torch, shard.dtype)
            like = torch.empty(shard.box.shape, dtype=dtype, device="meta")
            if device == _HOST:
                tensors[shard.tensor] = allocate_pinned_like(like)
            else:
                tensors[shard.tensor] = torch.empty_like(like, device=device)
    return tensors
