"""Log-probs of rows of tokens by transformers in float32, many rows at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.types import Array, Row

TOKENS_PER_PASS = 16384


class RowScorer:
    """A model in float32 that scores rows."""

    def __init__(self, hf_dir: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
        self._model.eval()

    def __call__(self, rows: Sequence[Array]) -> list[Array]:
        """Return float32 [T] for each row: log-probs of tokens given those before; the first's 0.

        Rows are padded at their ends, which no earlier token sees.
        """
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        found: list[Array] = [np.zeros(0, np.float32)] * len(rows)
        while order:
            longest = len(rows[order[0]])
            chosen = order[: max(1, TOKENS_PER_PASS // longest)]
            del order[: len(chosen)]
            ids_BT = torch.zeros(len(chosen), longest, dtype=torch.int64)
            for b, i in enumerate(chosen):
                ids_BT[b, : len(rows[i])] = torch.from_numpy(rows[i].astype(np.int64))
            with torch.no_grad():
                logprobs_BTV = self._model(ids_BT).logits[:, :-1].log_softmax(-1)
            own_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0].numpy()
            for b, i in enumerate(chosen):
                found[i] = np.concatenate([[0.0], own_BT[b, : len(rows[i]) - 1]])
        return found


def largest_error(rows: Sequence[Row], scored: Sequence[Array]) -> float:
    """Return how far the rows' trained log-probs are from `scored` ones, at the most."""
    pairs = zip(rows, scored, strict=True)
    return max(float(np.abs(row.logprobs - own)[row.is_trained].max()) for row, own in pairs)
