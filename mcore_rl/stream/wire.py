"""What ranks and controller tell each other, as bytes: layouts, commands, orders, reports."""

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from mcore_rl.slices.box import Box, Shard

COMMAND_NAME = "mcore_rl"
"""Name of the tensor that carries a command in SGLang's /update_weights_from_tensor."""


@dataclass(frozen=True)
class Link:
    """How the ranks around an engine meet: `num_senders` ranks that send, then its `num_receivers` own."""

    engine: str
    store_host: str
    store_port: int
    num_senders: int
    num_receivers: int
    bucket_bytes: int
    timeout_s: float
    staged: bool = False
    """Slices land beside the parameters, to be swapped in together; else in the parameters."""
    layouts: str = ""
    """RecordedLayouts of both sides, encoded; without, the ranks list their shards for one another."""
    upstream: str = ""
    """The engine whose ranks pass on what they got, each to the same rank; without, trainer ranks send."""

    def __post_init__(self) -> None:
        for name in ("num_senders", "num_receivers", "bucket_bytes", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"link to {self.engine}: {name}={getattr(self, name)} must be greater than 0"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """A readable name per rank."""
        senders = range(self.num_senders)
        if self.upstream:
            sending = [f"rank {rank} of engine {self.upstream}" for rank in senders]
        else:
            sending = [f"trainer rank {rank}" for rank in senders]
        return (
            *sending,
            *(f"rank {rank} of engine {self.engine}" for rank in range(self.num_receivers)),
        )


@dataclass(frozen=True)
class Report:
    """What one rank did for one engine; `error` is None if all of it succeeded."""

    rank: str
    digest: str = ""
    num_bytes: int = 0
    num_buckets: int = 0
    seconds: float = 0.0
    error: str | None = None
    peer_lost: bool = False
    """The error is that a peer went away or kept us waiting, so its own report says more."""
    silent: bool = False
    """The rank itself said nothing."""


Action = Literal["connect", "receive", "swap"]


@dataclass(frozen=True)
class Command:
    """What the ranks of an engine are told through SGLang: join a link, receive a version, swap it in."""

    link: Link
    action: Action
    version: int | None = None


@dataclass(frozen=True)
class Order:
    """What the ranks of an engine are to stage; from trainer ranks unless there is an engine `upstream`.

    What they have got they pass on `downstream`.
    """

    version: int
    upstream: Link | None = None
    downstream: Link | None = None


def encode_order(order: Order) -> bytes:
    return json.dumps(asdict(order)).encode()


def decode_order(data: bytes) -> Order:
    fields = json.loads(data)
    links = (fields[end] and Link(**fields[end]) for end in ("upstream", "downstream"))
    return Order(fields["version"], *links)


def encode_command(command: Command) -> Tensor:
    """uint8 tensor."""
    return torch.frombuffer(bytearray(json.dumps(asdict(command)).encode()), dtype=torch.uint8)


def decode_command(tensor_u8: Tensor) -> Command:
    fields = json.loads(bytes(tensor_u8.tolist()))
    return Command(Link(**fields["link"]), fields["action"], fields["version"])


def encode_report(report: Report) -> bytes:
    return json.dumps(asdict(report)).encode()


def decode_report(data: bytes) -> Report:
    return Report(**json.loads(data))


def encode_shards(shards: Sequence[Shard]) -> bytes:
    """Columns of JSON, deflated: a layout repeats the same few strides and dtypes thousands of times."""
    rows = [
        (s.box.name, s.box.start, s.box.stop, s.tensor, s.offset, s.strides, s.dtype)
        for s in shards
    ]
    return zlib.compress(json.dumps(list(zip(*rows, strict=True))).encode(), level=1)


def decode_shards(data: bytes) -> tuple[Shard, ...]:
    columns = json.loads(zlib.decompress(data))
    return tuple(
        Shard(Box(name, tuple(start), tuple(stop)), tensor, offset, tuple(strides), dtype)
        for name, start, stop, tensor, offset, strides, dtype in zip(*columns, strict=True)
    )
