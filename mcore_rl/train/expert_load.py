"""Adds up the tokens that each expert got in an optimizer step and makes metrics of them."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.device import device


class StepLoad:
    """Sums the load over micro-batches; every token of a layer is counted on exactly one rank."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._shape = (num_layers, num_experts)
        self.clear()

    def clear(self) -> None:
        self._load_LE = torch.zeros(self._shape, dtype=torch.int64, device=device())
        self._losses: dict[str, Tensor] = {}

    def count(self, layer_number: int, routing_map_TE: Tensor, padding_T: Tensor | None) -> None:
        """Count tokens that layer `layer_number`, from 1, sends to the experts marked True."""
        if padding_T is not None:
            routing_map_TE = routing_map_TE & ~padding_T[:, None]
        self._load_LE[layer_number - 1] += routing_map_TE.sum(0)

    def add_loss(self, name: str, layer_number: int, loss: Tensor) -> None:
        """Add this rank's part of the balance loss `name`."""
        if name not in self._losses:
            self._losses[name] = torch.zeros(self._shape[0], dtype=torch.float64, device=device())
        self._losses[name][layer_number - 1] += loss

    def reduce(self, loss_names: Sequence[str]) -> tuple[Tensor, dict[str, float]]:
        """Return (load_LE, sums of each balance loss over layers and tokens) of the whole step.

        load_LE is float64, tokens per layer and expert. It is a collective over all ranks, which
        hold different layers (PP) or different tokens (TP, CP, DP).
        """
        zeros = torch.zeros(self._shape[0], dtype=torch.float64, device=device())
        parts = [
            self._load_LE.double(),
            *(self._losses.get(name, zeros)[:, None] for name in loss_names),
        ]
        whole = torch.cat(parts, dim=1)
        dist.all_reduce(whole)
        load_LE, *losses = whole.split([self._shape[1], *[1] * len(loss_names)], dim=1)
        return load_LE, {
            name: loss.sum().item() for name, loss in zip(loss_names, losses, strict=True)
        }


def load_metrics(load_LE: Tensor, moe_layers: Sequence[int]) -> Mapping[str, float]:
    """Return metrics of how evenly the experts are loaded, per MoE layer and as their mean.

    moe_layers      1 for each layer with experts, 0 for each dense one
    max_violation   load of the busiest expert / mean load, minus 1; 0 is perfect
                    (arXiv:2408.15664, equation 4); `max_violation_max` is the worst layer's
    idle_share      share of experts without a token
    load_entropy    entropy of the load / log(number of experts); 1 is perfect
    """
    layers = [i for i, has_experts in enumerate(moe_layers) if has_experts]
    load_LE = load_LE[layers].cpu()
    share_LE = load_LE / load_LE.sum(1, keepdim=True).clamp(min=1)
    num_experts = load_LE.shape[1]
    values = {
        "max_violation": share_LE.amax(1) * num_experts - 1,
        "idle_share": (load_LE == 0).double().mean(1),
        "load_entropy": torch.special.entr(share_LE).sum(1) / math.log(num_experts),
    }
    metrics = {f"router/{name}": value_L.mean().item() for name, value_L in values.items()}
    metrics["router/max_violation_max"] = values["max_violation"].max().item()
    for name, value_L in values.items():
        rows = zip(layers, value_L.tolist(), strict=True)
        metrics |= {f"router/layer_{layer:02d}/{name}": value for layer, value in rows}
    return metrics
