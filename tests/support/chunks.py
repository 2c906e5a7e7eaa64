"""Stands in for a GPTModel where only the numbers of its layers count."""

import torch


def chunk_of(first_layer: int, num_layers: int) -> torch.nn.Module:
    """Return a module with layers of these numbers, counted from 1, where a GPTModel has them."""
    layers = [torch.nn.Identity() for _ in range(num_layers)]
    for number, layer in enumerate(layers, first_layer):
        layer.layer_number = number  # type: ignore[assignment]
    decoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers)})
    return torch.nn.ModuleDict({"decoder": decoder})
