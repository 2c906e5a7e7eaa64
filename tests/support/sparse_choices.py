"""Which keys the indexers of a model with sparse attention choose: transformers, and engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

Array = np.ndarray[Any, Any]


class Chooser:
    """The log-probs of a model, and the keys that its layers read, by transformers."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._chosen: list[torch.Tensor] = []
        indexers = [layer.self_attn.indexer for layer in self._model.model.layers]
        for indexer in filter(None, indexers):
            indexer.register_forward_hook(
                lambda module, inputs, chosen: self._chosen.append(chosen[0])
            )
        self._places = [sum(map(bool, indexers[: i + 1])) - 1 for i in range(len(indexers))]
        """By layer, the number of the indexer that chose what it reads."""

    @torch.no_grad()
    def __call__(self, token_ids: Sequence[int]) -> tuple[torch.Tensor, Array]:
        """Return the next tokens' log-probs [T, V], and which keys are chosen, bool [T, L, T]."""
        self._chosen.clear()
        logprobs_TV = self._model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)
        num_tokens = len(token_ids)
        chosen = np.zeros((num_tokens, len(self._places), num_tokens), bool)
        for layer, place in enumerate(self._places):
            positions_TK = self._chosen[place]
            np.put_along_axis(chosen[:, layer], positions_TK.numpy().astype(np.int64), True, -1)
        return logprobs_TV, chosen & np.tri(num_tokens, dtype=bool)[:, None]


def mark_chosen(positions_TLK: Array, num_keys: int) -> Array:
    """Return which keys are chosen, bool [T, L, num_keys], of their positions; -1 is none."""
    chosen = np.zeros((*positions_TLK.shape[:2], num_keys + 1), bool)
    np.put_along_axis(chosen, positions_TLK.astype(np.int64), True, -1)
    return chosen[..., :-1]
