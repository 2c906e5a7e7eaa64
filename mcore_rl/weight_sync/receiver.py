"""Runs in each SGLang rank: gets commands through the custom weight loader, and receives slices.

SGLang runs with `--custom-weight-loader mcore_rl.weight_sync.receiver.load`. The controller sends
commands through /update_weights_from_tensor. Over a staged link only `connect` and `swap` are such
commands: the controller requests each version through the link's store, and a thread receives the
version while the engine decodes. Outcomes are reported through the store, never raised: an
exception would end SGLang's scheduler.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn

from mcore_rl.device.gpu_memory import common_device
from mcore_rl.device.threads import start_thread
from mcore_rl.weight_sync.adapter.engine import EngineAdapter
from mcore_rl.weight_sync.adapter.served import ServedAdapters
from mcore_rl.weight_sync.adapter.serving import SERVER, Install
from mcore_rl.weight_sync.connection import EngineConnection
from mcore_rl.weight_sync.draft_model import ServedModel
from mcore_rl.weight_sync.execute import PlanExecutor
from mcore_rl.weight_sync.full_trace import FullTrace
from mcore_rl.weight_sync.link_end import LinkEnd, OpenMemory
from mcore_rl.weight_sync.link_store import LinkStore, publish_report, report_outcome
from mcore_rl.weight_sync.staging import Staging, start_background_stager
from mcore_rl.weight_sync.transports.select import MakeTransport, select_transport
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.wire import COMMAND_NAME, Command, Link, Report, decode_command
from mcore_rl.weights.box import Shard
from mcore_rl.weights.layouts.engine_trace import trace_load_weights
from mcore_rl.weights.layouts.layout import HfTensors
from mcore_rl.weights.models.mtp import DRAFT_MODEL

_log = logging.getLogger(__name__)

LoadWeights = Callable[[Any], object]
"""A model's load_weights: takes an iterable of (HF name, tensor)."""


def _fill_no_padding() -> None: ...


class WeightReceiver:
    """Executes commands in one engine rank; the command `connect` replaces the rank's link."""

    def __init__(
        self, make_transport: MakeTransport = select_transport, install: Install = SERVER.install
    ) -> None:
        """`install` has this rank's engine serve a version of an adapter."""
        self._make_transport = make_transport
        self._install_adapter = install
        self._connection: EngineConnection | None = None
        self._link: Link | None = None
        self._store: LinkStore | None = None
        self._staging: Staging | None = None
        self._fill_padding: Callable[[], None] = _fill_no_padding
        self._padded: frozenset[str] = frozenset()
        self._shards: Sequence[Shard] = ()
        """Those of the parameters, as traced last."""
        self._hf_tensors: HfTensors = {}
        """Shapes and dtypes of the tensors that trainer ranks send, by name."""
        self._served: ServedAdapters | None = None
        self._full_trace: FullTrace | None = None
        """Traces what the link's own trace left out; it begins after the first swap."""

    def handle(
        self,
        command: Command,
        receiver_rank: int,
        load_weights: LoadWeights,
        tensors: Mapping[str, Tensor],
    ) -> Report:
        """Execute `command` on `tensors`; publish and return a report, also of an error."""
        link = command.link
        rank = link.num_senders + receiver_rank
        if command.action == "connect":
            act = partial(self._connect, link, rank, load_weights, tensors)
        else:
            act = partial(self._move, command, tensors)
        report = report_outcome(link.name_rank(rank), act)
        if report.error is not None:
            self.close()
        if self._store is not None and not publish_report(
            self._store, command.action, rank, report
        ):
            self.close()
        return report

    def close(self) -> None:
        """Leave the link; peers that wait for this rank fail at once."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close()
        if self._full_trace is not None:
            self._full_trace.cancel()

    def _connect(
        self, link: Link, rank: int, load_weights: LoadWeights, tensors: Mapping[str, Tensor]
    ) -> Report:
        self.close()
        self._store = None
        self._link = None
        live = self._staging.find_live_segment(tensors) if self._staging is not None else None
        self._staging = None
        memory = None
        if link.staged:
            self._staging = Staging(tensors, live)
        if self._staging is not None and self._staging.segments is not None:
            memory = OpenMemory(self._staging.segments)
        end = LinkEnd.open(link, rank, common_device(tensors.values()), memory)
        self._store = end.store

        def trace(hf_tensors: HfTensors) -> Sequence[Shard]:
            typed = {
                name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in hf_tensors.items()
            }
            # In place, parameters come and go with an engine's memory; no later trace can use them.
            every = link.trace_all or not link.staged
            traced = trace_load_weights(load_weights, typed, tensors, every=every)
            self._full_trace = None
            if traced.is_sampled:
                self._full_trace = FullTrace(end.name, traced, load_weights, typed, tensors)
            self._fill_padding = traced.fill_padding
            self._padded = traced.padded
            self._shards = traced.shards
            self._hf_tensors = hf_tensors
            return traced.shards

        executor = PlanExecutor.meet(end, trace, self._make_transport)
        self._connection = EngineConnection(executor)
        self._link = link
        if link.loaded:
            self._connection.expect(tensors)
        if self._staging is not None:
            self._staging.finish(tensors, self._padded)
            adapter = EngineAdapter(self._connection, self._shards, tensors)
            shapes = {name: shape for name, (shape, _) in self._hf_tensors.items()}
            self._served = ServedAdapters(self._connection, shapes, self._install_adapter)
            start_background_stager(self._connection, self._staging, adapter, self._served)
        return self._connection.make_report()

    def _move(self, command: Command, tensors: Mapping[str, Tensor]) -> Report:
        """Receive a version into `tensors`, or swap in the staged version; verify it if asked."""
        link = command.link
        version = command.version
        if self._connection is None or self._link != link:
            raise TransferError(
                f"engine {link.engine} is not connected by this link; connect it again"
            )
        assert version is not None, f"{command.action} needs a version"
        if command.action == "swap":
            if command.weights:
                self._swap(self._connection, version, tensors, verify=command.verify)
            if command.adapters:
                self._install(self._connection, command, version, tensors)
            return Report(self._connection.end.name, self._connection.digest)
        assert not link.staged, (
            f"version {version}: a staged link receives by stage requests, not by commands"
        )
        report = self._connection.receive(version, tensors, link.timeout_s)
        # A colocated engine that released its memory since the last sync has lost its padding, too.
        self._fill_padding()
        if command.verify:
            self._connection.check_destination(version, tensors)
        return report

    def _install(
        self,
        connection: EngineConnection,
        command: Command,
        version: int,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Install a staged version of adapters; verify it, and the weights, if asked."""
        assert self._served is not None, f"version {version} of an adapter over an unstaged link"
        for name in command.adapters:
            self._served.install(name, version, verify=command.verify)
        if command.verify and not command.weights and connection.received_version is not None:
            connection.check_destination(connection.received_version, tensors)

    def _swap(
        self,
        connection: EngineConnection,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        verify: bool,
    ) -> None:
        """Swap in the staged version; after the first swap, start the trace of all tensors."""
        assert self._staging is not None, f"swap of version {version} over an unstaged link"
        full_trace = self._full_trace
        if full_trace is None:
            self._staging.swap(version, tensors)
        else:
            full_trace.check()
            with full_trace.let_parameters_change():
                self._staging.swap(version, tensors)
        if verify:
            connection.check_destination(version, tensors)
        if full_trace is not None:
            full_trace.start()


_RECEIVER = WeightReceiver()
"""The process's only receiver. It keeps the link, because SGLang calls `load` for every command."""


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Execute the command in `named_tensors`.

    SGLang calls this in every rank of an engine, between /begin_weight_update and
    /end_weight_update.
    """
    from sglang.srt.runtime_context import get_parallel

    commands = [tensor for name, tensor in named_tensors if name == COMMAND_NAME]
    if len(commands) != 1:
        names = [name for name, _ in named_tensors]
        _log.error("expected one tensor named %s, got %s", COMMAND_NAME, names)
        return
    command = decode_command(commands[0])
    parallel = get_parallel()
    receiver_rank = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    served = ServedModel(model, getattr(model, DRAFT_MODEL, None))
    tensors = served.list_parameters()
    load_weights = keep_on_calling_thread(served.load_weights)
    if command.action == "connect" and parallel.pp_size > 1:
        _connect_in_thread(command, receiver_rank, load_weights, tensors)
        return
    report = _RECEIVER.handle(command, receiver_rank, load_weights, tensors)
    if command.action != "connect" and command.weights and report.error is None:
        for part in served.parts:
            finish_load(part, is_draft=part is served.draft)
            renew_derived(part)
        forget_image_embeddings()


def finish_load(model: Any, *, is_draft: bool) -> None:
    """Have a model compute what it keeps of loaded weights.

    SGLang's draft model of GLM-4.7-Flash has to be told that it is one.
    """
    from sglang.srt.model_loader.loader import post_load_weights

    if is_draft and hasattr(model, "post_load_weights"):
        model.post_load_weights(is_nextn=True)
    else:
        post_load_weights(model)


def renew_derived(model: nn.Module) -> None:
    """Let modules renew what they keep of their parameters and post_load_weights does not know.

    Norms that multiply with 1 + weight keep that sum, and gated delta nets a view of their
    convolution's weight, which may have new memory. The scales of an FP8 KV cache are parameters
    that nobody sends: an engine that released its memory has lost them, but not their copies.
    """
    for module in model.modules():
        for name in ("k_scale", "v_scale"):
            known, scale = getattr(module, f"{name}_float", None), getattr(module, name, None)
            if known is not None and scale is not None:
                scale.data.fill_(known)
        refresh = getattr(module, "refresh_gemma_weight", None)
        if refresh is not None:
            refresh()
        refresh = getattr(getattr(module, "attn", None), "refresh_conv_weights", None)
        if refresh is not None:
            refresh(module.get_parameter("conv1d.weight"))


def forget_image_embeddings() -> None:
    """Clear SGLang's cache of image embeddings, which come from the vision tower's old weights.

    SGLang clears this cache neither with the KV cache nor when weights change.
    """
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def _connect_in_thread(
    command: Command, receiver_rank: int, load_weights: LoadWeights, tensors: Mapping[str, Tensor]
) -> None:
    """Return once the loader is traced; meet the other ranks in a thread.

    A pipeline stage gets a command only after the stage before it has executed the command. So a
    stage that waited here for later stages would wait forever.
    """
    traced = Event()

    def load_and_signal(named_tensors: Any) -> object:
        try:
            return load_weights(named_tensors)
        finally:
            traced.set()

    def connect() -> None:
        try:
            _RECEIVER.handle(command, receiver_rank, load_and_signal, tensors)
        finally:
            traced.set()

    start_thread(common_device(tensors.values()), connect, name="connect")
    traced.wait(command.link.timeout_s)


def keep_on_calling_thread(load_weights: LoadWeights) -> LoadWeights:
    """Keep SGLang's loaders from passing host tensors to other threads, which cannot be traced.

    Loaders do not pass on tensors that are marked as views of a buffer about to be reused.
    """
    from sglang.srt.model_loader.weight_utils import RUNAI_STREAMER_TENSOR_ATTR

    def mark(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            setattr(tensor, RUNAI_STREAMER_TENSOR_ATTR, True)
            yield name, tensor

    return lambda named_tensors: load_weights(mark(named_tensors))
