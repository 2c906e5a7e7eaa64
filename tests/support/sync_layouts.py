"""A small set of HF tensors, cut over ranks as training and engines cut them."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mcore_rl.slices.box import Box, Shard
from mcore_rl.slices.plan.coverage import contiguous_strides

HIDDEN, HEADS, EXPERTS, VOCAB = 12, 6, 4, 33


def make_tensors(seed: int = 0) -> dict[str, Tensor]:
    """HF name -> random float32 tensor."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
        **{f"attn.{x}_proj.weight": (HEADS * 2, HIDDEN) for x in "qkv"},
        **{
            f"experts.{e}.{x}_proj.weight": (8, HIDDEN) if x != "down" else (HIDDEN, 8)
            for e in range(EXPERTS)
            for x in ("gate", "up", "down")
        },
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


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
    own = {}
    for name, tensor in hf.items():
        is_expert = name.startswith("experts.")
        if not is_expert or int(name.split(".")[1]) * world_size // EXPERTS == rank:
            own[name] = tensor
    return _cut(own, 0, 1, dtype, {})


class FusedEngine(nn.Module):
    """A tensor-parallel engine rank: fused qkv, stacked experts, padded vocabulary."""

    def __init__(self, rank: int, world_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world_size

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, float("nan"), dtype=dtype), requires_grad=False)

        rows = HEADS * 2 // world_size
        inner = 8 // world_size
        self.embed = empty(-(-VOCAB // world_size), HIDDEN)
        self.norm = empty(HIDDEN)
        self.qkv = empty(3 * rows, HIDDEN)
        self.w13 = empty(EXPERTS, 2 * inner, HIDDEN)
        self.w2 = empty(EXPERTS, HIDDEN, inner)

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
        loaded = min(rows, VOCAB - self.rank * rows)
        self.embed.data[:loaded].copy_(tensor.narrow(0, self.rank * rows, loaded))
        self.embed.data[loaded:].fill_(0)

    def _load_expert(self, expert: int, projection: str, tensor: Tensor) -> None:
        inner = self.w2.shape[2]
        if projection == "down":
            self.w2.data[expert].copy_(tensor.narrow(1, self.rank * inner, inner))
        else:
            half = self.w13.data[expert].narrow(0, inner * (projection == "up"), inner)
            half.copy_(tensor.narrow(0, self.rank * inner, inner))
