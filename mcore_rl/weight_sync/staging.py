"""Holds a second set of a rank's parameters: filled while the engine decodes, then swapped in.

A thread of the engine rank receives each version that the controller requests, and forwards the
version to the next engine of a chain.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from mcore_rl.device import synchronize
from mcore_rl.device.threads import start_thread
from mcore_rl.weight_sync.adapter.engine import EngineAdapter
from mcore_rl.weight_sync.adapter.served import ServedAdapters
from mcore_rl.weight_sync.connection import EngineConnection
from mcore_rl.weight_sync.execute import PlanExecutor, VerifiedBuckets
from mcore_rl.weight_sync.link_store import LinkStore, publish_report, report_outcome
from mcore_rl.weight_sync.transports.host.segment import Segment, allocate_like
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import AdapterRequest, Link, Report, StageRequest


class Staging:
    """Holds the next version in `tensors`; takes as much memory as the parameters themselves.

    On the host, both sets lie in memory that other processes can map, so the parameters are moved.
    """

    def __init__(self, parameters: Mapping[str, Tensor], live: Segment | None = None) -> None:
        """Allocate the second set and copy the parameters' values: versions bring no padding.

        On the host a thread copies the values; call `finish` before the set is used.
        `live`: the segment of an earlier Staging in which the parameters lie now.
        """
        self.segments: tuple[Segment, Segment] | None = None
        """The memory of both sets, if that is on the host. The second one is new."""
        self._filling: Future[None] | None = None
        with torch.inference_mode(False):
            if all(parameter.is_cpu for parameter in parameters.values()):
                live = live or _move_to_segment(parameters)
                values = {name: parameter.detach() for name, parameter in parameters.items()}
                staged, offsets = allocate_like(values)
                self._filling = _run_in_thread(staged.write, values, offsets)
                self.tensors = _make_tensors(staged, values, offsets)
                self.segments = live, staged
            else:
                self.tensors = {
                    name: torch.empty_like(parameter).copy_(parameter.detach())
                    for name, parameter in parameters.items()
                }
        self.version: int | None = None
        """The version that `tensors` holds completely, or None."""

    def finish(self, parameters: Mapping[str, Tensor], changed: Iterable[str] = ()) -> None:
        """Wait until the second set has the parameters' values, and copy those `changed` since.

        Raises OSError if there is no memory for the set.
        """
        if self._filling is not None:
            self._filling.result()
        for name in changed:
            self.tensors[name].copy_(parameters[name].detach())

    def find_live_segment(self, parameters: Mapping[str, Tensor]) -> Segment | None:
        """Return the segment that holds all parameters with memory of their own, if any does."""
        own = [parameter for parameter in parameters.values() if _owns_memory(parameter)]
        for segment in self.segments or ():
            if all(map(segment.holds, own)):
                return segment
        return None

    def swap(self, version: int, parameters: Mapping[str, Tensor]) -> None:
        """Give all parameters the staged values of `version`.

        On the host, pointers are exchanged. On a device, values are copied, because captured graphs
        refer to the parameters' addresses. Parameters that share memory are copied, too.

        Raises TransferError, and changes nothing, if `version` is not the staged version.
        """
        if self.version != version:
            raise TransferError(
                f"version {version} is to be swapped in, but {self.version} is staged"
            )
        self.version = None
        for name, parameter in parameters.items():
            staged = self.tensors[name]
            if parameter.is_cpu and _owns_memory(parameter):
                self.tensors[name] = parameter.data
                parameter.data = staged
            else:
                parameter.data.copy_(staged)
        synchronize()


def _move_to_segment(parameters: Mapping[str, Tensor]) -> Segment:
    """Move the parameters with memory of their own to a new segment; return the segment."""
    own = {name: p.detach() for name, p in parameters.items() if _owns_memory(p)}
    segment, offsets = allocate_like(own)
    segment.write(own, offsets)
    for name, moved in _make_tensors(segment, own, offsets).items():
        parameters[name].data = moved
    return segment


def _make_tensors(
    segment: Segment, like: Mapping[str, Tensor], offsets: Mapping[str, int]
) -> dict[str, Tensor]:
    return {name: segment.make_tensor_like(tensor, offsets[name]) for name, tensor in like.items()}


def _run_in_thread(function: Callable[..., None], *arguments: Any) -> "Future[None]":
    pool = ThreadPoolExecutor(1, thread_name_prefix="staging")
    future = pool.submit(function, *arguments)
    pool.shutdown(wait=False)
    return future


def _owns_memory(parameter: Tensor) -> bool:
    return parameter.untyped_storage().nbytes() == parameter.nbytes


_log = logging.getLogger(__name__)


def start_background_stager(
    connection: EngineConnection,
    staging: Staging,
    adapter: EngineAdapter,
    served: ServedAdapters,
) -> None:
    """Serve the link's stage requests in a thread until the controller drops the link.

    `adapter` merges factors into weights; `served` are those that the engine serves beside them.
    """
    store = LinkStore.open(connection.end.link)
    stager = _BackgroundStager(store, connection, staging, adapter, served)
    start_thread(connection.end.device, stager.run, name="weights")


class _BackgroundStager:
    def __init__(
        self,
        store: LinkStore,
        connection: EngineConnection,
        staging: Staging,
        adapter: EngineAdapter,
        served: ServedAdapters,
    ) -> None:
        self._store = store
        self._connection = connection
        self._link = connection.end.link
        self._staging = staging
        self._adapter = adapter
        self._served = served
        self._receiving: PlanExecutor | None = None
        """Receives from a relay; kept for the next version."""
        self._forwarding: PlanExecutor | None = None
        """Sends to the next engine, while idle; a thread takes it and returns it on success."""

    def run(self) -> None:
        """Serve requests in order; only a failure to receive from trainer ranks ends the link."""
        end = self._connection.end
        for number in count():
            try:
                request = self._store.wait_stage_request(number, end.name)
            except TransferError as error:
                _log.info("%s", error)  # A dropped link ends this way, too.
                break
            report = report_outcome(end.name, partial(self._stage, request))
            is_broken = report.error is not None and request.receive_link is None
            if is_broken:
                self._connection.close()
            if not publish_report(self._store, "receive", end.rank, report) or is_broken:
                break
        self._adapter.close()
        self._served.close()
        self._close_receiving()
        self._close_forwarding()

    def _stage(self, request: StageRequest) -> Report:
        if request.adapter is not None and request.adapter.name:
            return self._served.stage(request.version, request.adapter)
        self._staging.version = None
        if request.adapter is not None:
            return self._stage_factors(request.version, request.adapter)
        verified = VerifiedBuckets()
        if request.forward_link is None:
            self._close_forwarding()
        else:
            self._start_forwarding(request.forward_link, request.version, verified)
        try:
            relay = None
            if request.receive_link is not None:
                relay = self._open_receiving(request.receive_link)
            report = self._connection.receive(
                request.version,
                self._staging.tensors,
                self._link.timeout_s,
                relay,
                verified,
            )
        except Exception as error:
            verified.fail(str(error))
            self._close_receiving()
            raise
        self._staging.version = request.version
        return report

    def _stage_factors(self, version: int, request: AdapterRequest) -> Report:
        """Open the links of factors, or stage the version that they make of the weights."""
        if request.factors_link is not None:
            self._close_receiving()
            self._close_forwarding()
            return self._adapter.open(version, request, self._staging.tensors)
        report = self._adapter.stage(version, request, self._staging.tensors)
        self._staging.version = version
        return report

    def _start_forwarding(self, link: Link, version: int, verified: VerifiedBuckets) -> None:
        # A swap exchanges tensors in the staging dictionary, so the thread gets a copy of it.
        arguments = (link, version, dict(self._staging.tensors), verified)
        start_thread(self._connection.end.device, self._forward, arguments, name="relay")

    @torch.no_grad()
    def _forward(
        self, link: Link, version: int, tensors: Mapping[str, Tensor], verified: VerifiedBuckets
    ) -> None:
        """Forward verified buckets to the next engine.

        A failure affects only the next engine, which then gets its slices from the trainer ranks.
        """
        executor = self._forwarding
        self._forwarding = None
        try:
            if executor is not None and executor.end.link != link:
                executor.close()
                executor = None
            executor = executor or self._connection.open_relay(link)
            executor.execute(version, tensors, time.monotonic() + link.timeout_s, verified)
        except (TransferError, RuntimeError) as error:
            _log.warning(
                "version %d is not forwarded to engine %s: %s", version, link.engine, error
            )
            if executor is not None:
                executor.close()
        else:
            self._forwarding = executor

    def _open_receiving(self, link: Link) -> PlanExecutor:
        if self._receiving is None or self._receiving.end.link != link:
            self._close_receiving()
            self._receiving = self._connection.open_relay(link)
        return self._receiving

    def _close_receiving(self) -> None:
        executor = self._receiving
        self._receiving = None
        if executor is not None:
            executor.close()

    def _close_forwarding(self) -> None:
        executor = self._forwarding
        self._forwarding = None
        if executor is not None:
            executor.close()
