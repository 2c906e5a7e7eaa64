"""A mixture of experts cut over ranks as training and engines do, to sync without SGLang.

A scene describes the trainer and engine ranks of a sync, and its outcome.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mcore_rl.weight_sync.transports.select import (
    MakeTransport,
    make_gloo_transport,
    make_gpu_pair_transport,
    select_transport,
)
from mcore_rl.weight_sync.wire import Report
from mcore_rl.weights.box import Box, Shard, contiguous_strides


@dataclass(frozen=True)
class ToySizes:
    """A model of one layer. `heads * head` rows each of q, k and v; `inner` rows of an expert."""

    hidden: int = 12
    heads: int = 6
    head: int = 2
    experts: int = 4
    inner: int = 8
    vocab: int = 33

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """HF name -> shape."""
        up, down = (self.inner, self.hidden), (self.hidden, self.inner)
        return {
            "embed.weight": (self.vocab, self.hidden),
            "norm.weight": (self.hidden,),
            **{f"attn.{x}_proj.weight": (self.heads * self.head, self.hidden) for x in "qkv"},
            **{
                f"experts.{e}.{x}_proj.weight": down if x == "down" else up
                for e in range(self.experts)
                for x in ("gate", "up", "down")
            },
        }


TINY = ToySizes()


def make_tensors(
    seed: int = 0,
    sizes: ToySizes = TINY,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """HF name -> random tensor. Values depend on the kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype, device=device)
        for name, shape in sizes.shapes.items()
    }


def _cut(
    hf: Mapping[str, Tensor], rank: int, world_size: int, dtype: str, axis_of: Mapping[int, int]
) -> tuple[list[Shard], dict[str, Tensor]]:
    """A rank's shards and local tensors; `axis_of`: number of axes -> axis that is cut."""
    shards = []
    tensors = {}
    for name, tensor in hf.items():
        start = [0] * tensor.dim()
        stop = list(tensor.shape)
        axis = axis_of.get(tensor.dim())
        if axis is not None:
            size = tensor.shape[axis]
            start[axis] = rank * size // world_size
            stop[axis] = (rank + 1) * size // world_size
        box = Box(name, tuple(start), tuple(stop))
        part = tensor[tuple(map(slice, start, stop))].to(getattr(torch, dtype)).clone().contiguous()
        tensors[f"local.{name}"] = part
        shards.append(Shard(box, f"local.{name}", 0, contiguous_strides(part.shape), dtype))
    return shards, tensors


def row_cut(
    hf: Mapping[str, Tensor], rank: int, world_size: int, dtype: str
) -> tuple[list[Shard], dict[str, Tensor]]:
    """Matrices cut by rows; vectors on every rank."""
    return _cut(hf, rank, world_size, dtype, {2: 0})


def column_cut(
    hf: Mapping[str, Tensor], rank: int, world_size: int, dtype: str
) -> tuple[list[Shard], dict[str, Tensor]]:
    """Matrices cut by columns; vectors on every rank."""
    return _cut(hf, rank, world_size, dtype, {2: 1})


def expert_cut(
    hf: Mapping[str, Tensor], rank: int, world_size: int, dtype: str
) -> tuple[list[Shard], dict[str, Tensor]]:
    """Experts dealt out to the ranks; the rest on every rank, as data-parallel replicas are."""
    num_experts = len({name.split(".")[1] for name in hf if name.startswith("experts.")})
    own = {}
    for name, tensor in hf.items():
        is_expert = name.startswith("experts.")
        if not is_expert or int(name.split(".")[1]) * world_size // num_experts == rank:
            own[name] = tensor
    return _cut(own, 0, 1, dtype, {})


class FusedEngine(nn.Module):
    """A tensor-parallel engine rank: fused qkv, stacked experts, padded vocabulary."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        dtype: torch.dtype,
        sizes: ToySizes = TINY,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self.sizes = sizes

        def empty(*shape: int) -> nn.Parameter:
            values = torch.full(shape, float("nan"), dtype=dtype, device=device)
            return nn.Parameter(values, requires_grad=False)

        rows = sizes.heads * sizes.head // world_size
        inner = sizes.inner // world_size
        self.embed = empty(-(-sizes.vocab // world_size), sizes.hidden)
        self.norm = empty(sizes.hidden)
        self.qkv = empty(3 * rows, sizes.hidden)
        self.w13 = empty(sizes.experts, 2 * inner, sizes.hidden)
        self.w2 = empty(sizes.experts, sizes.hidden, inner)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            module, _, projection = name.removesuffix(".weight").rpartition(".")
            if name == "norm.weight":
                self.norm.data.copy_(tensor)
            elif name == "embed.weight":
                self._load_embedding(tensor)
            elif module == "attn":
                slot = "qkv".index(projection[0])
                rows = self.qkv.shape[0] // 3
                self.qkv.data.narrow(0, slot * rows, rows).copy_(
                    tensor.narrow(0, self.rank * rows, rows)
                )
            else:
                self._load_expert(int(module.split(".")[1]), projection.split("_")[0], tensor)

    def _load_embedding(self, tensor: Tensor) -> None:
        rows = self.embed.shape[0]
        loaded = min(rows, self.sizes.vocab - self.rank * rows)
        self.embed.data[:loaded].copy_(tensor.narrow(0, self.rank * rows, loaded))
        self.embed.data[loaded:].fill_(0)

    def _load_expert(self, expert: int, projection: str, tensor: Tensor) -> None:
        inner = self.w2.shape[2]
        if projection == "down":
            self.w2.data[expert].copy_(tensor.narrow(1, self.rank * inner, inner))
        else:
            half = self.w13.data[expert].narrow(0, inner * (projection == "up"), inner)
            half.copy_(tensor.narrow(0, self.rank * inner, inner))


Cut = Callable[[Mapping[str, Tensor], int, int, str], tuple[list[Shard], dict[str, Tensor]]]


@dataclass(frozen=True)
class Fault:
    """A fault on sender `rank` of a link, when it starts its message number `message`."""

    rank: int
    message: int
    kind: str
    """"corrupt": a byte changes in transit; "kill", "stop": the process gets SIGKILL, SIGSTOP."""


@dataclass(frozen=True)
class Scene:
    """`cut` deals HF tensors to the senders; receivers are FusedEngine ranks of `dtype`."""

    cut: Cut
    num_senders: int
    num_receivers: int
    dtype: str = "float32"
    sender_dtype: str = "float32"
    sizes: ToySizes = TINY
    bucket_bytes: int = 700
    timeout_s: float = 30.0
    num_syncs: int = 2
    fault: Fault | None = None
    absent_sender: int | None = None
    """This trainer rank never connects."""
    staged: bool = False
    releases_memory: bool = False
    """Before each sync the engine gives up its memory, and gets it back with other values in it."""
    pull: bool = False
    """Engines read from the trainer's GPU memory; without GPUs bytes take their usual route."""
    between_machines: bool = False
    """Bytes take the route they take between machines."""
    on_gpu: tuple[bool, bool] = (False, False)
    """(senders, receivers): True if their tensors lie on GPUs, which the ranks take in turns."""

    @property
    def make_transport(self) -> MakeTransport:
        if not self.between_machines:
            return select_transport
        return make_gpu_pair_transport if all(self.on_gpu) else make_gloo_transport


@dataclass(frozen=True)
class Received:
    """A receiver's results.

    reports       of connecting and of each sync
    differing     parameters that are not bit for bit what the engine's own loader makes
    swap_seconds  of each staged version
    """

    reports: list[Report]
    differing: list[str]
    swap_seconds: list[float]


@dataclass(frozen=True)
class SceneOutcome:
    """senders: each one's reports, None if it died; num_keys: keys left in the link's store."""

    senders: list[list[Report] | None]
    receivers: list[Received]
    num_keys: int

    @property
    def reports(self) -> list[Report]:
        """Reports of the ranks that are alive, by rank and then by action."""
        alive = [reports for reports in self.senders if reports is not None]
        by_rank = [*alive, *(received.reports for received in self.receivers)]
        return [report for reports in by_rank for report in reports]
