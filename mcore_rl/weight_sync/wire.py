"""Encodes and decodes the messages between controller, trainer ranks and engine ranks.

All three run the same release, so the encodings carry no version number.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, overload

import torch
from torch import Tensor

from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.lora.places import AdapterStamp, Content

COMMAND_NAME = "mcore_rl"
"""Name of the tensor that carries a command in SGLang's /update_weights_from_tensor."""

MAX_LAYOUT_BYTES = 512 * 2**20
"""A rank's layout has some 100 bytes of JSON per shard."""


@dataclass(frozen=True)
class Link:
    """All facts that a rank needs to join a link.

    A link has `num_senders` sending ranks, then `num_receivers` ranks of the engine. All ranks meet
    at one key-value store.
    """

    engine: str
    store_host: str
    store_port: int
    store_key: str = field(repr=False)
    num_senders: int
    num_receivers: int
    bucket_bytes: int
    timeout_s: float
    staged: bool = False
    """Whether slices are received into a second set of parameters, which is swapped in as a whole,
    and not into the parameters themselves.
    """
    layouts: str = ""
    """Encoded RecordedLayouts of both sides; if empty, the ranks list their shards."""
    delta: str = "off"
    """Whether only changes since the last version travel between machines: off; auto: in messages
    from host to host; always: messages between GPUs go from host to host, too.
    """
    pull: bool = False
    """Whether engine ranks read slices from the GPU memory of trainer ranks where they can."""
    trace_all: bool = False
    """Whether engine ranks trace every tensor of their loader before they link."""
    loaded: bool = False
    """Whether engine and senders loaded one checkpoint. Then the first received version is compared
    with the loaded weights.
    """
    relay: str = ""
    """The engine that sends: each of its ranks forwards received slices to the same rank of
    `engine`. If empty, trainer ranks send.
    """
    content: Content = "weights"
    """Kind of the tensors that travel over the link."""
    unadapted: bool = False
    """Whether trainer ranks send the weights below their factors in the place of merged ones."""
    adapter: str = ""
    """The adapter whose factors travel, of several that trainer ranks hold; empty: the only one."""

    def __post_init__(self) -> None:
        for name in ("num_senders", "num_receivers", "bucket_bytes", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"link to {self.engine}: {name}={getattr(self, name)} must be greater than 0"
                )

    @property
    def pulls(self) -> bool:
        """Whether trainer ranks open their memory; an engine that passes weights on does not."""
        return self.pull and not self.relay

    @property
    def num_ranks(self) -> int:
        return self.num_senders + self.num_receivers

    @property
    def names(self) -> Sequence[str]:
        """A readable name for each rank, senders first; only errors need names."""
        return _Names(self)

    def name_rank(self, rank: int) -> str:
        """Return the readable name of a rank, numbered over the link."""
        if rank >= self.num_senders:
            return f"rank {rank - self.num_senders} of engine {self.engine}"
        return f"rank {rank} of engine {self.relay}" if self.relay else f"trainer rank {rank}"


@dataclass(frozen=True)
class _Names(Sequence[str]):
    link: Link

    def __len__(self) -> int:
        return self.link.num_ranks

    @overload
    def __getitem__(self, rank: int) -> str: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[str]: ...
    def __getitem__(self, rank: int | slice) -> str | Sequence[str]:
        ranks = range(len(self))[rank]
        return self.link.name_rank(ranks) if isinstance(ranks, int) else [self[r] for r in ranks]


@dataclass(frozen=True)
class Report:
    """The outcome of one action on one rank; `error` is None if it succeeded."""

    rank: str
    digest: str = ""
    num_bytes: int = 0
    num_buckets: int = 0
    seconds: float = 0.0
    saved_bytes: int = 0
    """Bytes of num_bytes that did not travel."""
    num_slices: int = 0
    num_changed: int | None = None
    """Slices that differ from the version received before; None without such a version."""
    error: str | None = None
    peer_lost: bool = False
    """A peer went away or kept this rank waiting; the peer's own report says more."""
    missing: bool = False
    """The rank sent no report, so the controller made this one."""


Action = Literal["connect", "receive", "swap"]


@dataclass(frozen=True)
class Command:
    """A command to all ranks of an engine, sent through SGLang.

    It is to join a link, receive a version into the parameters, or swap in a staged version.

    adapters  names of those whose staged version is installed
    weights   whether staged weights are swapped in
    """

    link: Link
    action: Action
    version: int | None = None
    verify: bool = False
    """Read the version back from the parameters and compare it with the senders' checksums."""
    adapters: tuple[str, ...] = ()
    weights: bool = True


@dataclass(frozen=True)
class StageRequest:
    """A request to an engine's ranks, in the link's store: receive a version while decoding."""

    version: int
    receive_link: Link | None = None
    """The link to the relay that sends; if None, trainer ranks send over the engine's own link."""
    forward_link: Link | None = None
    """The link to the next engine, which gets verified buckets; None without a next engine."""
    adapter: "AdapterRequest | None" = None
    """Receive factors in the place of weights."""


@dataclass(frozen=True)
class AdapterRequest:
    """A request to merge low-rank factors into the weights below them, or to serve them as an
    adapter.

    stamp          of the factors that the engine takes
    base_link      the link that brings the weights below the factors; both links are opened, and
                   the product is compared with the weights that the engine has, but not staged
    factors_link   None: the one that is open
    on_gpu         keep the weights below the factors where the parameters are, not on the host
    verify         compare the product with the trainer ranks' checksums, which they publish
    name           of the adapter that the factors are a version of; empty: they are merged
    """

    stamp: AdapterStamp
    base_link: Link | None = None
    factors_link: Link | None = None
    on_gpu: bool = False
    verify: bool = False
    name: str = ""


def encode_stage_request(request: StageRequest) -> bytes:
    return json.dumps(asdict(request)).encode()


def decode_stage_request(data: bytes) -> StageRequest:
    fields = json.loads(data)
    return StageRequest(
        fields["version"],
        _decode_link(fields["receive_link"]),
        _decode_link(fields["forward_link"]),
        _decode_adapter(fields["adapter"]),
    )


def _decode_adapter(fields: dict | None) -> AdapterRequest | None:
    if fields is None:
        return None
    return AdapterRequest(
        AdapterStamp(**fields["stamp"]),
        _decode_link(fields["base_link"]),
        _decode_link(fields["factors_link"]),
        fields["on_gpu"],
        fields["verify"],
        fields["name"],
    )


def _decode_link(fields: dict | None) -> Link | None:
    return None if fields is None else Link(**fields)


def encode_command(command: Command) -> Tensor:
    """Return the command as a uint8 tensor, the only payload SGLang passes to a weight loader."""
    return torch.frombuffer(bytearray(json.dumps(asdict(command)).encode()), dtype=torch.uint8)


def decode_command(tensor_u8: Tensor) -> Command:
    fields = json.loads(bytes(tensor_u8.tolist()))
    named = {"link": Link(**fields["link"]), "adapters": tuple(fields["adapters"])}
    return Command(**{**fields, **named})


def encode_report(report: Report) -> bytes:
    return json.dumps(asdict(report)).encode()


def decode_report(data: bytes) -> Report:
    return Report(**json.loads(data))


def encode_shards(shards: Sequence[Shard]) -> bytes:
    """Return `shards` as deflated columns of JSON.

    A layout repeats the same few strides and dtypes thousands of times, so columns compress well.
    """
    rows = [
        (s.box.name, s.box.start, s.box.stop, s.tensor, s.offset, s.strides, s.dtype)
        for s in shards
    ]
    columns = list(zip(*rows, strict=True))
    return zlib.compress(json.dumps(columns).encode(), level=1)


def decode_shards(data: bytes) -> tuple[Shard, ...]:
    columns = json.loads(_inflate(data))
    return tuple(
        Shard(Box(name, tuple(start), tuple(stop)), tensor, offset, tuple(strides), dtype)
        for name, start, stop, tensor, offset, strides, dtype in zip(*columns, strict=True)
    )


def _inflate(data: bytes) -> bytes:
    """Return the inflated bytes; ValueError if they are too many for a layout, or cut off."""
    inflater = zlib.decompressobj()
    inflated = inflater.decompress(data, MAX_LAYOUT_BYTES)
    if not inflater.eof:
        raise ValueError(
            f"a layout of {len(data)} bytes inflates to more than {MAX_LAYOUT_BYTES}, or is cut off"
        )
    return inflated
