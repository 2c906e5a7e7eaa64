"""Inside each SGLang rank: commands come in through the custom weight loader, slices land in the parameters.

SGLang runs with `--custom-weight-loader mcore_rl.stream.receiver.load`; the controller sends commands through
/update_weights_from_tensor. What happened is reported through the link's store, never by an exception: that
would be the end of SGLang's scheduler.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mcore_rl.slices.box import Shard
from mcore_rl.slices.engine_trace import trace_load_weights
from mcore_rl.stream.connection import (
    Connection,
    Layouts,
    MakeTransport,
    gloo_transport,
)
from mcore_rl.stream.store import LinkStore
from mcore_rl.stream.transport import TransferError
from mcore_rl.stream.wire import COMMAND_NAME, Link, Report, decode_command, hf_shapes

logger = logging.getLogger(__name__)

LoadWeights = Callable[[Any], object]


class WeightReceiver:
    """One engine rank's end of the link to the trainer ranks; connects anew whenever it is told to."""

    def __init__(self, make_transport: MakeTransport = gloo_transport) -> None:
        self._make_transport = make_transport
        self._connection: Connection | None = None
        self._link: Link | None = None
        self._store: LinkStore | None = None

    def handle(
        self,
        link: Link,
        version: int | None,
        receiver_rank: int,
        load_weights: LoadWeights,
        tensors: Mapping[str, Tensor],
    ) -> Report:
        """Connect (version None) or receive `version` into `tensors`; report the outcome, errors too."""
        began_s = time.monotonic()
        rank = link.num_senders + receiver_rank
        try:
            if version is None:
                report = self._connect(link, rank, load_weights, tensors)
            else:
                report = self._receive(link, version, tensors)
        except Exception as error:
            logger.exception("weight update failed")
            self.close()
            message = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
            seconds = time.monotonic() - began_s
            lost = isinstance(error, TransferError) and error.peer_lost
            report = Report(link.names[rank], seconds=seconds, error=message, peer_lost=lost)
        self._publish(version, rank, report)
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
        self._store, self._link = None, None
        self._store = LinkStore.open(link)

        def trace(sources: Layouts) -> Sequence[Shard]:
            shapes = hf_shapes(sources)
            return trace_load_weights(load_weights, shapes, tensors)

        self._connection = Connection(self._store, link, rank, trace, self._make_transport)
        self._link = link
        return Report(link.names[rank], self._connection.digest, self._connection.num_bytes)

    @torch.no_grad()
    def _receive(self, link: Link, version: int, tensors: Mapping[str, Tensor]) -> Report:
        if self._connection is None or self._link != link:
            raise TransferError(f"engine {link.engine} is not connected by this link; connect it again")
        return self._connection.receive(version, tensors, link.timeout_s)

    def _publish(self, version: int | None, rank: int, report: Report) -> None:
        if self._store is None:
            return
        try:
            self._store.put_report(version, rank, report)
        except RuntimeError:
            logger.exception("the controller's store is gone; this report is lost: %s", report)
            self.close()


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
    link, version = decode_command(commands[0])
    parallel = get_parallel()
    receiver_rank = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    tensors = dict(model.named_parameters())
    report = _RECEIVER.handle(link, version, receiver_rank, model.load_weights, tensors)  # type: ignore[operator]
    if version is not None and report.error is None:
        post_load_weights(model)
