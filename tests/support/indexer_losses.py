"""The loss of indexers by its formula, from transformers' models in float64.

For a token t that attends to the keys S, in one layer:

    p = attention of t to each key of S, summed over heads and divided by its sum over S
    q = softmax over S of the indexer's scores
    loss = sum over S of p * (log p - log q)
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mcore_rl.types import TrainBatch
from tests.support.exact_gradients import InDouble, use_double
from tests.support.indexers import sequences_of, use_given_keys


class _KeptScores(TorchFunctionMode):
    """Keeps what an indexer takes the best keys of."""

    scores_TS: Tensor

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.topk:
            self.scores_TS = args[0][0]
        return func(*args, **(kwargs or {}))


def _score(indexer: Any, args: Any, kwargs: Any) -> Tensor:
    """Return the indexer's scores of all keys of a sequence, [T, S], with their gradient."""
    forward = type(indexer).forward.__wrapped__  # without its no_grad
    with torch.enable_grad(), InDouble(), _KeptScores() as kept:
        forward(indexer, *args, **kwargs)
    return kept.scores_TS


def _add_up(attention_HTS: Tensor, scores_TS: Tensor) -> Tensor:
    total_TS = attention_HTS.detach().sum(0)
    target_TS = total_TS / total_TS.sum(1, keepdim=True)
    is_read_TS = target_TS > 0
    own_TS = scores_TS.masked_fill(~is_read_TS, float("-inf")).log_softmax(1)
    return sum(
        (target[read] * (target[read].log() - own[read])).sum()
        for target, own, read in zip(target_TS, own_TS, is_read_TS, strict=True)
    )  # type: ignore[return-value]


def compute_losses(
    model: Any, batches: Sequence[TrainBatch], *, replay: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean over tokens of each indexer's loss, and HF name -> gradient of their sum.

    replay   attention reads the keys that batches name; the model is in float64 after it
    """
    use_double(model)
    model.set_attn_implementation("eager")
    layers = [layer.self_attn for layer in model.model.layers if layer.self_attn.indexer]
    for layer in layers:
        layer.indexer.requires_grad_(True)
    sums, num_tokens = [torch.zeros((), dtype=torch.float64) for _ in layers], 0
    for batch in batches:
        given = batch.indexer_topk_TLK
        parts = [None] * len(batch.lens_N) if given is None else given.split(list(batch.lens_N))
        for tokens_T, keys_TLK in zip(sequences_of(batch), parts, strict=True):
            num_tokens += len(tokens_T)
            found = _run(model, layers, tokens_T, keys_TLK if replay else None)
            sums = [total + loss for total, loss in zip(sums, found, strict=True)]
    (sum(sums) / num_tokens).backward()  # type: ignore[union-attr]
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if ".indexer." in name and parameter.grad is not None
    }
    return torch.stack(sums).detach() / num_tokens, gradients


def _run(
    model: Any, layers: Sequence[Any], tokens_T: Tensor, keys_TLK: Tensor | None
) -> list[Tensor]:
    """Return the loss of each layer, summed over the tokens of a sequence."""
    calls: dict[int, Any] = {}
    attention: dict[int, Tensor] = {}
    hooks = []
    for i, layer in enumerate(layers):

        def keep_call(_: Any, args: Any, kwargs: Any, i: int = i) -> None:
            calls[i] = args, kwargs

        def keep_attention(_: Any, __: Any, out: Any, i: int = i) -> None:
            attention[i] = out[1][0]

        hooks.append(layer.indexer.register_forward_pre_hook(keep_call, with_kwargs=True))
        hooks.append(layer.register_forward_hook(keep_attention))
    given = nullcontext() if keys_TLK is None else use_given_keys(model, keys_TLK)
    with torch.no_grad(), InDouble(), given:
        model(tokens_T[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return [
        _add_up(attention[i], _score(layer.indexer, *calls[i])) for i, layer in enumerate(layers)
    ]
