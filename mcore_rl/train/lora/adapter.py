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

A tensor's factors lie whole on every rank that holds a part of the tensor (tensor-parallel ranks,
expert-tensor-parallel ranks for experts), so a checkpoint of them fits any layout:

    lora.<HF tensor>.A, lora.<HF tensor>.B     one entry each, written by one rank
    lora.<adapter>.<HF tensor>.A, ...          likewise of several adapters (turns.py)

A is drawn as in PEFT, B is 0 (arXiv:2106.09685, section 4.1). A critic's value head is trained and
saved as a whole beside the factors.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_rl.config import LoraConfig, ModelConfig
from mcore_rl.train.lora.frozen import ALONE, BaseSharing, FrozenWeights
from mcore_rl.train.lora.packed import find_packed_parts
from mcore_rl.train.weights import weight_layout
from mcore_rl.weights.box import Box, Shape, Shard
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.base import find_base_sum
from mcore_rl.weights.lora.facts import FACTORS, AdapterFacts, is_of_expert
from mcore_rl.weights.lora.peft_files import check_start, read_peft
from mcore_rl.weights.lora.places import (
    AdapterStamp,
    Content,
    Held,
    make_stamp_shard,
    make_whole_factors,
)
from mcore_rl.weights.lora.product import add_product
from mcore_rl.weights.lora.targets import list_targets
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.value_head import find_value_head


@dataclass(frozen=True)
class AdaptedMatrix:
    """An HF matrix [out, in] with factors, and where this rank holds parts of it.

    shares   of each shard: the part of its gradient that counts, since tensor-parallel ranks may
             hold the same box, each with its whole gradient
    """

    name: str
    shape: Shape
    shards: tuple[Shard, ...]
    shares: tuple[float, ...]
    is_expert: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the ranks that hold parts of the tensor, in one data-parallel replica."""
        return _find_group(self.is_expert)


class LowRankFactors(torch.nn.Module):
    """The factors of a chunk's targets, as parameters "<number>_A" and "<number>_B"."""

    def __init__(
        self,
        targets: Sequence[AdaptedMatrix],
        rank: int,
        dtype: torch.dtype,
        seed: int,
        prefix: str = FACTORS,
    ) -> None:
        """`prefix` begins their keys in a checkpoint."""
        super().__init__()
        self.targets = tuple(targets)
        self._prefix = prefix
        for number, target in enumerate(targets):
            out_size, in_size = target.shape
            first = torch.nn.Parameter(_draw_first(target.name, rank, in_size, seed).to(dtype))
            second = torch.nn.Parameter(torch.zeros(out_size, rank, dtype=dtype))
            for parameter in (first, second):
                # Experts go to the buffers that expert data-parallel ranks reduce.
                parameter.allreduce = not target.is_expert  # type: ignore[attr-defined]
            self.register_parameter(f"{number}_A", first)
            self.register_parameter(f"{number}_B", second)

    def list_pairs(self) -> Iterator[tuple[AdaptedMatrix, torch.nn.Parameter, torch.nn.Parameter]]:
        """Yield (target, A, B)."""
        for number, target in enumerate(self.targets):
            yield target, getattr(self, f"{number}_A"), getattr(self, f"{number}_B")

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the whole factors; one of the ranks that have them writes them."""
        state = {}
        for number, (target, first, second) in enumerate(self.list_pairs()):
            for letter, parameter in (("A", first), ("B", second)):
                state[f"{prefix}{number}_{letter}"] = ShardedTensor.from_rank_offsets(
                    f"{self._prefix}{target.name}.{letter}",
                    parameter,
                    replica_id=(0, target.group.rank(), _find_replica(target)),
                )
        return state


def _find_replica(target: AdaptedMatrix) -> int:
    if target.is_expert:
        return ps.get_expert_data_parallel_rank()
    return ps.get_data_parallel_rank(with_context_parallel=True)


def _draw_first(name: str, rank: int, in_size: int, seed: int) -> Tensor:
    """Return A from a generator of its own: all layouts draw the same."""
    digest = hashlib.sha256(f"{seed} {FACTORS}{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    bound = 1 / math.sqrt(in_size)
    return torch.empty(rank, in_size).uniform_(-bound, bound, generator=generator)


def find_targets(
    shards: Sequence[Shard],
    shapes: Mapping[str, Shape],
    names: Collection[str],
    cut: Collection[str],
) -> list[AdaptedMatrix]:
    """Return the targets among the tensors of this rank's shards; a collective.

    names   HF tensors that have factors
    cut     local tensors whose gradient on a rank is that of its part of each sequence
    """
    held: dict[str, list[Shard]] = {name: [] for name in names}
    for shard in shards:
        if shard.box.name in held:
            held[shard.box.name].append(shard)
    targets = [
        AdaptedMatrix(name, shapes[name], tuple(own), (), is_of_expert(name))
        for name, own in held.items()
        if own
    ]
    copies = {is_expert: _count_copies(targets, is_expert) for is_expert in (False, True)}
    return [
        replace(
            target,
            shares=tuple(
                1.0 if shard.tensor in cut else 1.0 / copies[target.is_expert][shard.box]
                for shard in target.shards
            ),
        )
        for target in targets
    ]


def _count_copies(targets: Sequence[AdaptedMatrix], is_expert: bool) -> Counter[Box]:
    """Return on how many ranks of their group the boxes of targets lie; a collective."""
    own = [
        shard.box for target in targets if target.is_expert == is_expert for shard in target.shards
    ]
    group = _find_group(is_expert)
    held: list[list[Box]] = [[] for _ in range(group.size())]
    dist.all_gather_object(held, own, group=group)
    return Counter(box for boxes in held for box in boxes)


def _find_group(is_expert: bool) -> dist.ProcessGroup:
    if is_expert:
        return ps.get_expert_tensor_parallel_group()
    return ps.get_tensor_model_parallel_group()


_MODULE = FACTORS.rstrip(".")
"""A chunk's attribute that has the factors which are trained now."""
_STAMP = "stamp"
"""Local tensor of the stamp that factors travel with."""
DDP_OF_FACTORS = {"overlap_grad_reduce": False}
"""Factors get their gradients outside of autograd, which DDP would watch; they are small."""


def make_adapters(
    chunks: Sequence[torch.nn.Module],
    config: LoraConfig,
    model: ModelConfig,
    stored: ModelFacts,
    hf_config: HfConfig,
    seed: int,
    sharing: BaseSharing = ALONE,
) -> "list[LoraAdapter]":
    """Return the adapters that a recipe trains, new or from their `path`; a collective.

    [] if all weights are trained; several over the same frozen weights with `config.adapters`.
    `hf_config` describes the model that is built, which may have a value head that `stored` lacks.
    One rank reads what the base's checksum needs. Raises ValueError as `list_targets` and
    `check_start` do.
    """
    if not config.rank:
        return []
    sums = [""]
    if dist.get_rank() == 0:
        sums = [find_base_sum(model.init, stored, seed)]
    dist.broadcast_object_list(sums)
    adapters: list[LoraAdapter] = []
    for name, own in config.list_adapters().items():
        facts = AdapterFacts.make(own, hf_config, sums[0], str(stored.path))
        if adapters:
            adapters.append(adapters[0].make_another(facts, seed, name))
        else:
            files = stored if model.init == "hf" else None
            adapters.append(LoraAdapter(chunks, facts, hf_config, seed, sharing, name, files))
        if own.path:
            adapters[-1].start_from(Path(own.path), hf_config)
    return adapters


class LoraAdapter:
    """The factors of all chunks of this rank, and the frozen weights below them."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        facts: AdapterFacts,
        hf_config: HfConfig,
        seed: int,
        sharing: BaseSharing = ALONE,
        name: str = "",
        files: ModelFacts | None = None,
    ) -> None:
        """Freeze the chunks, which have their weights, and give them factors; a collective.

        A critic's value head is trained as a whole beside them.

        name    of one of several adapters
        files   the directory that the weights were read from; None: they were drawn
        """
        self._chunks = chunks
        names = list_targets(hf_config, facts.targets, facts.experts)
        shapes = hf_tensor_shapes(hf_config)
        shards, tensors = weight_layout(chunks, hf_config)
        cut = {name for name, parameter in _parameters(chunks) if _is_cut(parameter)}
        self._targets = find_targets(shards, shapes, names, cut)
        head = find_value_head(hf_config)
        self._tensors = tensors
        for chunk in chunks:
            for parameter_name, parameter in chunk.named_parameters():
                parameter.requires_grad_(parameter_name == head)
        held = {shard.tensor for target in self._targets for shard in target.shards}
        adapted = {key: tensors[key] for key in sorted(held)}
        packed = {}
        if files is not None and sharing == ALONE:
            packed = find_packed_parts(shards, adapted, files)
        self._frozen = FrozenWeights(adapted, sharing, packed)
        stamp = facts.make_stamp(hf_config)
        self._take(facts, seed, name, stamp.num_matrices)

    def make_another(self, facts: AdapterFacts, seed: int, name: str) -> "LoraAdapter":
        """Return an adapter of the same matrices over the same frozen weights."""
        assert (facts.targets, facts.experts) == (self.facts.targets, self.facts.experts), facts
        other = copy(self)
        other._take(facts, seed, name, self._num_matrices)
        return other

    def _take(self, facts: AdapterFacts, seed: int, name: str, num_matrices: int) -> None:
        """Draw the factors, and put them into the chunks."""
        self.facts = facts
        self.name = name
        self._num_matrices = num_matrices
        self._factors: list[LowRankFactors] = []
        prefix = f"{FACTORS}{name}." if name else FACTORS
        for i, chunk in enumerate(self._chunks):
            own = [t for t in self._targets if t.shards[0].tensor.startswith(f"{i}.")]
            first = next(chunk.parameters())
            factors = LowRankFactors(own, facts.rank, first.dtype, seed, prefix)
            self._factors.append(factors.to(first.device))
        stamp = AdapterStamp(facts.rank, facts.scale, num_matrices, facts.base)
        self._stamp = torch.tensor(stamp.encode(), device=next(self._chunks[0].parameters()).device)
        self.put_in()

    def put_in(self) -> None:
        """Make these the factors of the chunks; those of another adapter leave them."""
        for chunk, factors in zip(self._chunks, self._factors, strict=True):
            chunk.add_module(_MODULE, factors)

    @property
    def is_in(self) -> bool:
        """Whether these are the factors of the chunks."""
        return getattr(self._chunks[0], _MODULE) is self._factors[0]

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

    @property
    def frozen(self) -> FrozenWeights:
        """The weights below the factors, in host memory."""
        return self._frozen

    def layouts(self) -> dict[Content, Held]:
        """Return what this rank holds of the frozen weights, and of factors.

        The weights are the copies in host memory or, if some are kept packed, the model's own,
        which have the right values within `without` alone.
        """
        base = [shard for factors in self._factors for t in factors.targets for shard in t.shards]
        copies: Mapping[str, Tensor] = self._frozen.copies
        if self._frozen.packed:
            # They are sent from the model, while it has its frozen weights alone.
            copies = {shard.tensor: self._tensors[shard.tensor] for shard in base}
        return {"base": (base, dict(copies)), "factors": self.list_factors()}

    def list_factors(self) -> Held:
        """Return the shards of the whole factors, and of their stamp, and the tensors."""
        shards = [make_stamp_shard(_STAMP)]
        tensors = {_STAMP: self._stamp}
        for i, factors in enumerate(self._factors):
            for number, (matrix, first, second) in enumerate(factors.list_pairs()):
                names = f"{i}.{number}_A", f"{i}.{number}_B"
                tensors |= zip(names, (first.detach(), second.detach()), strict=True)
                dtype = str(first.dtype).removeprefix("torch.")
                rank = self.facts.rank
                shards += make_whole_factors(matrix.name, matrix.shape, rank, names, dtype)
        return shards, tensors

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
        """Turn gradients of adapted weights into those of factors, while these are in the chunks.

        The DDPs of all adapters must have their buffers already, which would hold the weights'
        gradients otherwise.
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
            project = _Projection(name, entries, lambda: self.is_in)
            parameter.register_post_accumulate_grad_hook(project)

    def pass_gradients_on(self) -> None:
        """Have the first layers want gradients of their input; once for all adapters."""
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
        self._frozen.restore(self._tensors)


class _Projection:
    """Turns the gradient of a parameter into those of its tensors' factors, and drops it."""

    def __init__(
        self,
        name: str,
        entries: Sequence[tuple[Shard, float, Tensor, Tensor]],
        is_in: Callable[[], bool],
    ) -> None:
        """`is_in` returns whether the factors are those that are trained now."""
        self._name = name
        self._entries = entries
        self._is_in = is_in

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        if not self._is_in():
            return
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
