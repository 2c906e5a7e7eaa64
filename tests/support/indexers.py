"""Transformers' sparse attention as an oracle: which keys it chose, and what follows from others.

Rows of keys are as engines report them: rising positions in a sequence, -1 where a token sees
fewer keys than are chosen, and no row for the last token of a sequence.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_rl.types import TrainBatch


def load_oracle(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def sort_keys(chosen_TK: Tensor, topk: int) -> Tensor:
    """Return int32 [T, topk] of what an indexer chose, which has keys that a token cannot see."""
    num_tokens = len(chosen_TK)
    position_T1 = torch.arange(num_tokens)[:, None]
    beyond = num_tokens
    seen_TK = torch.where(chosen_TK <= position_T1, chosen_TK.long(), beyond).sort(1).values
    rows = torch.full((num_tokens, topk), -1, dtype=torch.int32)
    rows[:, : seen_TK.shape[1]] = torch.where(seen_TK < beyond, seen_TK, -1).int()
    return rows


def score_and_choose(model: Any, tokens_T: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Return token-aligned log-probs of a sequence, and the keys that indexers chose, [T, L, K]."""
    chosen: list[Tensor] = []
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda _, __, out: chosen.append(out[0]))
        for layer in model.model.layers
    ]
    logprobs_T = score(model, tokens_T)
    for hook in hooks:
        hook.remove()
    return logprobs_T, torch.stack([sort_keys(rows, topk) for rows in chosen], 1)


def score(model: Any, tokens_T: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(tokens_T[None]).logits[0]
    logprobs_T = logits[:-1].log_softmax(-1).gather(-1, tokens_T[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), logprobs_T])


@contextmanager
def use_given_keys(model: Any, keys_TLK: Tensor) -> Iterator[None]:
    """Make the indexers choose these keys; their own where a token has none."""

    def choose(layer: int, own_1TK: Tensor) -> Tensor:
        keys_TK = keys_TLK[:, layer]
        has_any_T1 = (keys_TK >= 0).any(1, keepdim=True)
        # A key may be named twice, so the first one stands for those that are missing.
        filled_TK = torch.where(keys_TK >= 0, keys_TK, keys_TK[:, :1])
        own_TK = own_1TK[0]
        own_TK = own_TK[:, torch.arange(keys_TK.shape[1]).clamp(max=own_TK.shape[1] - 1)]
        return torch.where(has_any_T1, filled_TK, own_TK)[None].to(own_1TK.dtype)

    hooks = [
        layer.self_attn.indexer.register_forward_hook(
            lambda _, __, out, number=number: choose(number, out)
        )
        for number, layer in enumerate(model.model.layers)
        if layer.self_attn.indexer is not None
    ]
    yield
    for hook in hooks:
        hook.remove()


def sequences_of(batch: TrainBatch) -> Sequence[Tensor]:
    return batch.token_ids_T.split(list(batch.lens_N))


def find_max_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Return the largest difference of an element."""
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))


def with_random_keys(batches: list[TrainBatch], topk: int) -> list[TrainBatch]:
    """Return the batches with keys of four layers that no indexer chose.

    The last token of a sequence has none.
    """
    generator, out = torch.Generator().manual_seed(3), []
    for batch in batches:
        keys_TLK = torch.full((len(batch.token_ids_T), 4, topk), -1, dtype=torch.int32)
        first = 0
        for length in batch.lens_N:
            for t in range(length - 1):
                for layer in range(4):
                    row = torch.randperm(t + 1, generator=generator)[:topk].sort().values
                    keys_TLK[first + t, layer, : len(row)] = row.int()
            first += length
        out.append(replace(batch, indexer_topk_TLK=keys_TLK))
    return out
