"""Layers that add features of a vision tower's inner blocks to the hidden states of images.

    layer 0 --> + features[0] --> layer 1 --> + features[1] --> layer 2 --> ...

The features travel as `context`, which megatron-core hands from layer to layer, through recomputed
layers too, for cross-attention that these models do not have (DeepStack, arXiv:2406.04334). Those
of later pipeline stages are rows of what stages exchange, below the hidden states:

    [t, 1, H] hidden states
    [t, 1, H] features of the next layer
    [t, 1, H] features of the layer behind it ...
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from mcore_rl.train.chunk_run import layers_of


class DeepstackLayer(TransformerLayer):
    """A layer whose output has the features of its number added, if there are any.

    A feature of the tower's recomputed blocks must come in as an argument: taken from an attribute,
    each recomputed layer would run the tower's backward pass by itself.
    """

    def forward(
        self, *args: Any, context: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (hidden states, features for later layers).

        context   [K, t, 1, H], features of this layer and the next K - 1 layers for the tokens of
                  this rank, 0 for text; None where there are none
        """
        hidden_t1H, _ = super().forward(*args, **kwargs)
        if context is None:
            return hidden_t1H, None
        return hidden_t1H + context[0], context[1:] if len(context) > 1 else None


def spread_features(features: tuple[Tensor, ...], rows_t: Tensor, like: Tensor) -> Tensor | None:
    """Return `context` of DeepstackLayer in the dtype of `like`; None without features.

    features   of each layer, [R, H] each
    rows_t     row of each token of this rank, -1 for text
    """
    if not features:
        return None
    is_image_t11 = (rows_t >= 0)[:, None, None]
    own_Kt1H = torch.stack([rows_RH[rows_t.clamp(min=0), None] for rows_RH in features])
    return torch.where(is_image_t11, own_Kt1H, 0).to(like.dtype)


def carried_features(chunk: GPTModel) -> tuple[int, int]:
    """Return how many features of each image travel into a chunk of a model, and out of it."""
    num_features = getattr(chunk, "num_features", 0)
    if not num_features:
        return 0, 0
    layers = layers_of(chunk)
    return max(num_features - layers.start, 0), max(num_features - layers.stop, 0)


def join_features(hidden_t1H: Tensor, features_Kt1H: Tensor | None) -> Tensor:
    """Return hidden states and features as rows of one tensor, [(1 + K) t, 1, H]."""
    if features_Kt1H is None:
        return hidden_t1H
    return torch.cat([hidden_t1H, features_Kt1H.flatten(0, 1)])


def part_features(rows: Tensor, num_tokens: int) -> tuple[Tensor, Tensor | None]:
    """Return what `join_features` joined of so many tokens."""
    hidden_t1H, rest = rows[:num_tokens], rows[num_tokens:]
    if not len(rest):
        return rows, None
    return hidden_t1H, rest.unflatten(0, (-1, num_tokens))
