"""Trains low-rank factors in the place of a model's weights: W = W0 + s B A.

    frozen W0 (host)     factors A, B: Megatron's DDP and optimizer have these alone
         |                   |
         +---- merge --------+--> W, which every forward pass and every weight sync reads
                                  |
       dA, dB <---- project ------+--- dW of each backward pass, dropped at once

The model's layers know nothing of it: they compute with the merged weights that the engines serve,
in the model's precision, so that log-probs of trainer and engine agree as without LoRA, and every
layout, family and kernel works as it is. On a rank's part of a tensor, rows R and columns C:

    W[R, C]  = W0[R, C] + s B[R] A[:, C]
    dB[R]   += s dW[R, C] A[:, C]^T          (chain rule of arXiv:2106.09685, equation 3)
    dA[:, C] += s B[R]^T dW[R, C]

Both sums go over the ranks that hold parts of the tensor. A backward pass costs what it costs
without LoRA; gradients, moments and main weights are those of the factors.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_rl.config import LoraConfig, ModelConfig
from mcore_rl.device import allocate_pinned_like
from mcore_rl.train.lora.factors import LowRankFactors, find_targets
from mcore_rl.train.weights import weight_layout
from mcore_rl.weights.box import Shard
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.base import find_base_sum
from mcore_rl.weights.lora.facts import FACTORS, AdapterFacts
from mcore_rl.weights.lora.peft_files import check_start, read_peft
from mcore_rl.weights.lora.product import add_product
from mcore_rl.weights.lora.targets import list_targets
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.models.table import HfConfig

DDP_OF_FACTORS = {"overlap_grad_reduce": False}
"""Factors get their gradients outside of autograd, which DDP would watch; they are small."""


def make_adapter(
    chunks: Sequence[torch.nn.Module],
    config: LoraConfig,
    model: ModelConfig,
    stored: ModelFacts,
    seed: int,
) -> "LoraAdapter":
    """Return the adapter that a recipe trains, new or from `config.path`; a collective.

    One rank reads what the base's checksum needs. Raises ValueError as `list_targets` and
    `check_start` do.
    """
    sums = [""]
    if dist.get_rank() == 0:
        sums = [find_base_sum(model.init, stored, seed)]
    dist.broadcast_object_list(sums)
    facts = AdapterFacts.make(config, stored.config, sums[0], str(stored.path))
    adapter = LoraAdapter(chunks, facts, stored.config, seed)
    if config.path:
        adapter.start_from(Path(config.path), stored.config)
    return adapter


class LoraAdapter:
    """The factors of all chunks of this rank, and the frozen weights below them."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        facts: AdapterFacts,
        hf_config: HfConfig,
        seed: int,
    ) -> None:
        """Freeze the chunks, which have their weights, and give them factors; a collective."""
        self._chunks = chunks
        self.facts = facts
        names = list_targets(hf_config, facts.targets, facts.experts)
        shapes = hf_tensor_shapes(hf_config)
        shards, tensors = weight_layout(chunks, hf_config)
        cut = {name for name, parameter in _parameters(chunks) if _is_cut(parameter)}
        targets = find_targets(shards, shapes, names, cut)
        self._factors: list[LowRankFactors] = []
        self._tensors = tensors
        for i, chunk in enumerate(chunks):
            chunk.requires_grad_(False)
            own = [t for t in targets if t.shards[0].tensor.startswith(f"{i}.")]
            dtype = next(chunk.parameters()).dtype
            factors = LowRankFactors(own, facts.rank, dtype, seed)
            chunk.add_module(FACTORS.rstrip("."), factors.to(next(chunk.parameters()).device))
            self._factors.append(factors)
        held = {shard.tensor for target in targets for shard in target.shards}
        self._base = {name: _copy_to_host(tensors[name]) for name in sorted(held)}

    @torch.no_grad()
    def start_from(self, folder: Path, hf_config: HfConfig) -> None:
        """Take the factors of an adapter in PEFT's format. Raises ValueError if it is another."""
        adapter = read_peft(folder)
        check_start(adapter, self.facts, hf_config)
        with adapter.open() as file:
            for factors in self._factors:
                for matrix, first, second in factors.list_pairs():
                    first.copy_(file.read(f"{matrix.name}.A"))
                    second.copy_(file.read(f"{matrix.name}.B"))
        self.merge()

    def finalize_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Do what megatron-core's finalize_model_grads does, for factors."""
        for factors in self._factors:
            for matrix, first, second in factors.list_pairs():
                if matrix.group.size() > 1:
                    # Ranks that hold parts of the tensor have parts of the sums.
                    for parameter in (first, second):
                        dist.all_reduce(parameter.main_grad, group=matrix.group)  # type: ignore[attr-defined]
        finalize_model_grads(*args, **kwargs)

    def watch_gradients(self) -> None:
        """Turn gradients of adapted weights into those of factors from now on.

        DDP must have its buffers already, which would hold the weights' gradients otherwise.
        """
        by_tensor: dict[str, list[tuple[Shard, float, Tensor, Tensor]]] = {}
        for factors in self._factors:
            for matrix, first, second in factors.list_pairs():
                for shard, share in zip(matrix.shards, matrix.shares, strict=True):
                    entry = (shard, share * self.facts.scale, first, second)
                    by_tensor.setdefault(shard.tensor, []).append(entry)
        parameters = dict(_parameters(self._chunks))
        for name, entries in by_tensor.items():
            parameter = parameters[name]
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(_Projection(name, entries))
        for chunk in self._chunks:
            embedding = getattr(unwrap_model(chunk), "embedding", None)
            if embedding is not None:
                # A layer that is computed again passes no gradient to weights unless its input
                # wants one, and frozen embeddings want none.
                embedding.register_forward_hook(lambda *args: args[-1].requires_grad_())

    @torch.no_grad()
    def merge(self) -> None:
        """Set the model's weights to W0 + s B A."""
        self._restore_base()
        for factors in self._factors:
            for matrix, first, second in factors.list_pairs():
                for shard in matrix.shards:
                    rows, columns = _ranges(shard)
                    view = shard.view(self._tensors)
                    add_product(view, first[:, columns], second[rows], self.facts.scale)

    @contextmanager
    def without(self) -> Iterator[None]:
        """Within the block the model has its frozen weights alone."""
        self._restore_base()
        try:
            yield
        finally:
            self.merge()

    @torch.no_grad()
    def _restore_base(self) -> None:
        for name, base in self._base.items():
            self._tensors[name].copy_(base, non_blocking=True)


class _Projection:
    """Turns the gradient of a parameter into those of its tensors' factors, and drops it."""

    def __init__(self, name: str, entries: Sequence[tuple[Shard, float, Tensor, Tensor]]) -> None:
        self._name = name
        self._entries = entries

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        here: Mapping[str, Tensor] = {self._name: gradient.contiguous()}
        for shard, scale, first, second in self._entries:
            d_RC = shard.view(here).float()
            rows, columns = _ranges(shard)
            a_rC, b_Rr = first[:, columns].float(), second[rows].float()
            first_any: Any = first
            second_any: Any = second
            second_any.main_grad[rows].addmm_(d_RC, a_rC.T, alpha=scale)
            first_any.main_grad[:, columns].addmm_(b_Rr.T, d_RC, alpha=scale)


def _ranges(shard: Shard) -> tuple[slice, slice]:
    rows, columns = map(slice, shard.box.start, shard.box.stop)
    return rows, columns


def _parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the chunks' parameters by the names of local_tensors."""
    for i, chunk in enumerate(chunks):
        for name, parameter in unwrap_model(chunk).named_parameters():
            yield f"{i}.{name}", parameter


def _is_cut(parameter: Tensor) -> bool:
    """Return whether a rank's gradient is that of its part of each sequence only."""
    return getattr(parameter, "sequence_parallel", False)


def _copy_to_host(tensor: Tensor) -> Tensor:
    copy = allocate_pinned_like(tensor)
    copy.copy_(tensor)
    return copy
