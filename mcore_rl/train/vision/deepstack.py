"""Layers that add features of a vision tower's inner blocks to the hidden states of images.

    layer 0 --> + features[0] --> layer 1 --> + features[1] --> layer 2 --> ...

The features travel as `context`, which megatron-core hands from layer to layer, through recomputed
layers too, for cross-attention that these models do not have (DeepStack, arXiv:2406.04334).
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class DeepstackLayer(TransformerLayer):
    """A layer whose output has the features of its number added, if there are any.

    A feature of the tower's recomputed blocks must come in as an argument: taken from an attribute,
    each recomputed layer would run the tower's backward pass by itself.
    """

    def forward(
        self, *args: Any, context: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (hidden states, features for later layers).

        context   [K, t, 1, H], features of the first K layers of the model for the tokens of this
                  rank, 0 for text; None where there are none
        """
        hidden_t1H, _ = super().forward(*args, **kwargs)
        if context is None:
            return hidden_t1H, None
        layer = self.layer_number - 1
        is_last = layer + 1 == len(context)
        return hidden_t1H + context[layer], None if is_last else context


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
