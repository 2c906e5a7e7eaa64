"""Gradients of a model spread over ranks as boxes of HF tensors, and their comparison."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_rl.train.trained_model import TrainedModel
from mcore_rl.weights.box import Box

Boxed = list[tuple[Box, Tensor]]


def boxed_gradients(model: TrainedModel) -> Boxed:
    """Return the last step's gradient of every trained parameter of this rank; a collective.

    Experts' biases are buffers, which have none.
    """
    gather_gradients(model)
    gradients = {
        f"{i}.{name}": cast(Any, parameter).main_grad
        for i, chunk in enumerate(model.chunks)
        for name, parameter in unwrap_model(chunk).named_parameters()
        if parameter.requires_grad
    }
    shards = [shard for shard in model.weight_layout()[0] if shard.tensor in gradients]
    return [(shard.box, shard.view(gradients).clone()) for shard in shards]


def whole_gradients(boxed: Boxed) -> dict[str, torch.Tensor]:
    """Return HF name -> gradient, assembled from the boxes of one process."""
    whole: dict[str, torch.Tensor] = {}
    for box, gradient in boxed:
        start = whole.get(box.name, torch.empty(0))
        if start.shape != torch.Size(box.stop):
            grown = torch.zeros(
                tuple(max(a, b) for a, b in zip(box.stop, _shape(start, box), strict=True))
            )
            if start.numel():
                grown[tuple(map(slice, start.shape))] = start
            whole[box.name] = grown
        whole[box.name][tuple(map(slice, box.start, box.stop))] = gradient
    return whole


def _shape(tensor: torch.Tensor, box: Any) -> tuple[int, ...]:
    return tuple(tensor.shape) if tensor.numel() else (0,) * len(box.stop)


OF_DELTA_NETS = 8e-6
"""Share of the largest gradient that gated delta nets may be off in float32. Their recurrence adds
up more than other layers: 5.7e-6 was seen."""


def find_tolerance(kind: str, others: float) -> float:
    """Return the share of the largest gradient that a tiny model's may be off, `others` without
    gated delta nets.
    """
    return OF_DELTA_NETS if kind.startswith(("qwen3_next", "qwen3_5")) else others


def check_gradients(
    per_rank: Sequence[Boxed], wanted: dict[str, Tensor], layout: Any, tolerance: float = 1e-6
) -> None:
    """Check that all ranks together hold `wanted`, within `tolerance` times its largest value."""
    largest = max(g.abs().max().item() for g in wanted.values())
    covered: dict[str, int] = {}
    for boxed in per_rank:
        for box, gradient in boxed:
            part = wanted[box.name][tuple(map(slice, box.start, box.stop))]
            difference = (gradient - part).abs().max()
            assert difference <= tolerance * largest, (layout, box, difference.item(), largest)
            covered[box.name] = covered.get(box.name, 0) + box.numel
    assert all(covered[name] >= g.numel() for name, g in wanted.items()), layout


def gather_gradients(model: TrainedModel) -> None:
    """Undo the distributed optimizer's reduce-scatter, so that every rank has whole gradients."""
    for chunk in model.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather(list(bucket.grad_data.chunk(group.size())), mine, group=group)
