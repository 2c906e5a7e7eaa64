"""Runs in each trainer rank: sends slices of its parameters to every engine that needs them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import common_device
from mcore_rl.slices.box import Shard
from mcore_rl.stream.connection import Connection
from mcore_rl.stream.link_end import LinkEnd
from mcore_rl.stream.routes.choice import MakeTransport, make_routed_transport
from mcore_rl.stream.routes.transport import TransferError
from mcore_rl.stream.wire import Link, Report


class WeightSender:
    """Feeds any number of engines, each over its own link; a failure affects one link alone."""

    def __init__(
        self,
        shards: Sequence[Shard],
        tensors: Mapping[str, Tensor],
        rank: int,
        make_transport: MakeTransport = make_routed_transport,
    ) -> None:
        """`shards` says what `tensors`, the rank's parameters, hold; each send reads them anew."""
        self._shards = tuple(shards)
        self._tensors = tensors
        self._rank = rank
        self._make_transport = make_transport
        self._connections: dict[str, Connection] = {}

    def connect(self, link: Link) -> Report:
        """Join the link's other ranks and agree on a plan; replaces an earlier link to the same
        engine.

        A failure is in the report's `error`.
        """
        self.disconnect(link.engine)
        try:
            end = LinkEnd.open(link, self._rank, common_device(self._tensors.values()))
            connection = Connection(end, lambda _: self._shards, self._make_transport)
        except (RuntimeError, ValueError) as error:
            peer_lost = isinstance(error, TransferError) and error.peer_lost
            return Report(link.names[self._rank], error=str(error), peer_lost=peer_lost)
        self._connections[link.engine] = connection
        return Report(connection.name, connection.digest, connection.num_bytes)

    def disconnect(self, engine: str) -> None:
        """Drop the link to `engine`, if there is one."""
        connection = self._connections.pop(engine, None)
        if connection is not None:
            connection.close()

    def send(self, version: int, engines: Sequence[str], timeout_s: float) -> dict[str, Report]:
        """Send the current parameters as `version` to all `engines` at once; return a report for
        each.

        A link whose transfer failed is dropped, because its messages are out of step: connect it
        again. Raises ValueError if an engine is not connected.
        """
        unknown = set(engines) - set(self._connections)
        if unknown:
            raise ValueError(f"engines {sorted(unknown)} are not connected; call connect first")
        if len(engines) == 1:
            return {engines[0]: self._send_to(engines[0], version, timeout_s)}
        with ThreadPoolExecutor(
            max_workers=max(1, len(engines)), thread_name_prefix="weights"
        ) as pool:
            reports = pool.map(lambda engine: self._send_to(engine, version, timeout_s), engines)
            return dict(zip(engines, reports, strict=True))

    @torch.no_grad()
    def _send_to(self, engine: str, version: int, timeout_s: float) -> Report:
        connection = self._connections[engine]
        try:
            return connection.send(version, self._tensors, timeout_s)
        except TransferError as error:
            self.disconnect(engine)
            return Report(connection.name, error=str(error), peer_lost=error.peer_lost)
