"""Gradients of vision-language models by transformers in float64, which no rounding blurs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mcore_rl.algo.sequences import sequence_sum
from mcore_rl.types import TrainBatch
from tests.support.tiny_training import token_loss
from tests.support.tiny_vision import split_batch


def compute_exact_gradients(
    model: Any, batches: Sequence[TrainBatch], temperature: float
) -> dict[str, Tensor]:
    """Return HF name -> gradient of the summed `token_loss`; the model is in float64 after it."""
    use_double(model)
    with InDouble():
        for batch in batches:
            _add_gradients(model, _to_double(batch), temperature)
    return dict(_name_gradients(model))


def use_double(model: Any) -> None:
    """Bring a model to float64; call it within `InDouble`."""
    model.double()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"  # the grouped product takes no float64


class InDouble(TorchFunctionMode):
    """Makes float64 of each float32 that the model's own code asks for, as norms do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **named)


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _to_double(batch: TrainBatch) -> TrainBatch:
    assert batch.loss_weights_T is not None and batch.advantages_T is not None
    images = batch.images and replace(batch.images, pixels_PD=batch.images.pixels_PD.double())
    return replace(
        batch,
        images=images,
        loss_weights_T=batch.loss_weights_T.double(),
        advantages_T=batch.advantages_T.double(),
    )


def _add_gradients(model: Any, batch: TrainBatch, temperature: float) -> None:
    parts = []
    for ids_T, images in split_batch(batch):
        kinds = (ids_T == model.config.image_token_id).int()[None]
        more = {"mm_token_type_ids": kinds, **images} if images else {}
        logits_TV = model(ids_T[None], **more).logits[0] / temperature
        log_p_TV = logits_TV.log_softmax(-1)[:-1]
        zero = torch.zeros(1)
        logprobs_T = torch.cat([zero, log_p_TV.gather(-1, ids_T[1:, None])[:, 0]])
        entropy_T = torch.cat([zero, -(log_p_TV.exp() * log_p_TV).sum(-1)])
        parts.append((logprobs_T, entropy_T))
    logprobs_T, entropy_T = (torch.cat(values) for values in zip(*parts, strict=True))
    sums = sequence_sum(batch.lens_N, logprobs_T.device, None)
    loss_T, _ = token_loss(logprobs_T, entropy_T, batch, sums)
    assert batch.loss_weights_T is not None
    (loss_T * batch.loss_weights_T).sum().backward()


def _name_gradients(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, gradient) under the names of the checkpoint."""
    names = {}
    if model.config.model_type == "qwen2_5_vl":
        names = {"model.visual.": "visual.", "model.language_model.": "model."}
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
    if model.config.model_type in ("kimi_vl", "kimi_k25"):
        gradients = model.saved_gradients()
    for name, gradient in gradients:
        for new, old in names.items():
            name = name.replace(new, old, 1)
        if ".experts." not in name:
            yield name, gradient
            continue
        if model.config.model_type == "qwen3_vl_moe":
            yield name, gradient.transpose(1, 2).contiguous()
            continue
        if model.config.model_type == "qwen3_5_moe":
            yield name, gradient
            continue
        stem, _, kind = name.rpartition(".")
        halves = kind.removesuffix("_proj").split("_")
        for expert, matrix in enumerate(gradient):
            for half, part in zip(halves, matrix.chunk(len(halves)), strict=True):
                yield f"{stem}.{expert}.{half}_proj.weight", part
