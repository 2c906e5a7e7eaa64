"""Inside each SGLang rank: commands come in through the custom weight loader, slices land in the parameters.

SGLang runs with `--custom-weight-loader mcore_rl.stream.receiver.load`; the controller sends commands through
/update_weights_from_tensor. Over a staged link only `connect` and `swap` come that way: a thread receives,
beside the decoding, what the controller orders through the link's store. What happened is reported through
the store, never by an exception: that would be the end of SGLang's scheduler.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor, nn

from mcore_rl.device.gpu_memory import common_device
from mcore_rl.slices.box import Shard
from mcore_rl.slices.layouts.engine_trace import trace_load_weights
from mcore_rl.stream.connection import Connection
from mcore_rl.stream.link_store import LinkStore
from mcore_rl.stream.orders import attempt, follow_orders, publish
from mcore_rl.stream.plan_handshake import HfTensors
from mcore_rl.stream.routes.choice import MakeTransport, make_routes
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.staging import Staging
from mcore_rl.stream.wire import COMMAND_NAME, Command, Link, Report, decode_command

logger = logging.getLogger(__name__)

LoadWeights = Callable[[Any], object]


class WeightReceiver:
    """One engine rank's end of the link to the trainer ranks; connects anew whenever it is told to."""

    def __init__(self, make_transport: MakeTransport = make_routes) -> None:
        self._make_transport = make_transport
        self._connection: Connection | None = None
        self._link: Link | None = None
        self._store: LinkStore | None = None
        self._staging: Staging | None = None

    def handle(
        self,
        command: Command,
        receiver_rank: int,
        load_weights: LoadWeights,
        tensors: Mapping[str, Tensor],
    ) -> Report:
        """Do as told and report the outcome, errors too; what is received lands in `tensors`."""
        link, action, version = command.link, command.action, command.version
        rank = link.num_senders + receiver_rank

        def work() -> Report:
            if action == "connect":
                return self._connect(link, rank, load_weights, tensors)
            if self._connection is None or self._link != link:
                raise TransferError(
                    f"engine {link.engine} is not connected by this link; connect it again"
                )
            assert version is not None, f"{action} needs a version"
            if action == "swap":
                assert self._staging is not None, "only a staged link is swapped"
                self._staging.swap(version, tensors)
                return Report(link.names[rank], self._connection.digest)
            assert not link.staged, (
                "what is received over a staged link is ordered through its store"
            )
            return self._connection.receive(version, tensors, link.timeout_s)

        report = attempt(link.names[rank], work)
        if report.error is not None:
            self.close()
        if self._store is not None and not publish(self._store, action, rank, report):
            self.close()
        return report

    def close(self) -> None:
        """Leave the link; its peers fail at once if they wait for this rank."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(
        self, link: Link, rank: int, load_weights: LoadWeights, tensors: Mapping[str, Tensor]
    ) -> Report:
        self.close()
        self._store, self._link, self._staging = None, None, None
        self._store = LinkStore.open(link)

        def trace(hf_tensors: HfTensors) -> Sequence[Shard]:
            typed = {
                name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in hf_tensors.items()
            }
            return trace_load_weights(load_weights, typed, tensors)

        device = common_device(tensors.values())
        self._connection = Connection(self._store, link, rank, trace, self._make_transport, device)
        self._link = link
        if link.staged:
            self._staging = Staging(tensors)
            follow_orders(self._connection, link, rank, self._staging)
        return Report(link.names[rank], self._connection.digest, self._connection.num_bytes)


_RECEIVER = WeightReceiver()
"""SGLang calls `load` anew for every command; what is connected lives here, once per process."""


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """The loader that SGLang calls in every rank of an engine, between begin and end of a weight update."""
    from sglang.srt.model_loader.loader import post_load_weights
    from sglang.srt.runtime_context import get_parallel

    commands = [tensor for name, tensor in named_tensors if name == COMMAND_NAME]
    if len(commands) != 1:
        names = [name for name, _ in named_tensors]
        logger.error("expected one tensor named %s, got %s", COMMAND_NAME, names)
        return
    command = decode_command(commands[0])
    parallel = get_parallel()
    receiver_rank = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    tensors = _loaded_parameters(model)
    load_weights = _in_this_thread(model.load_weights)  # type: ignore[arg-type]
    if command.action == "connect" and parallel.pp_size > 1:
        _connect_beside(command, receiver_rank, load_weights, tensors)
        return
    report = _RECEIVER.handle(command, receiver_rank, load_weights, tensors)
    if command.action != "connect" and report.error is None:
        post_load_weights(model)


def _loaded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Those that a checkpoint fills; SGLang marks the others, such as the scales of its KV cache."""
    parameters = model.named_parameters()
    return {
        name: tensor
        for name, tensor in parameters
        if not getattr(tensor, "_skip_weight_check", False)
    }


def _connect_beside(
    command: Command, receiver_rank: int, load_weights: LoadWeights, tensors: Mapping[str, Tensor]
) -> None:
    """Trace now, meet the other ranks in a thread.

    A stage of a pipeline hears of a command when the stage before it is done with it: it must not wait here.
    """
    traced = Event()

    def load_and_tell(named_tensors: Any) -> object:
        try:
            return load_weights(named_tensors)
        finally:
            traced.set()

    def connect() -> None:
        try:
            _RECEIVER.handle(command, receiver_rank, load_and_tell, tensors)
        finally:
            traced.set()

    Thread(target=connect, name="connect", daemon=True).start()
    traced.wait(command.link.timeout_s)


def _in_this_thread(load_weights: LoadWeights) -> LoadWeights:
    """Keep SGLang's loaders from handing host tensors to other threads, which tracing cannot follow.

    They do not where a tensor is marked as a view of a buffer that is about to be reused.
    """
    from sglang.srt.model_loader.weight_utils import RUNAI_STREAMER_TENSOR_ATTR

    def marked(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            setattr(tensor, RUNAI_STREAMER_TENSOR_ATTR, True)
            yield name, tensor

    return lambda named_tensors: load_weights(marked(named_tensors))
