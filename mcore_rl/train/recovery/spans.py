"""Names the parts of flat states that a rank has, alike in layouts that differ in data parallelism.

A parameter is the same on all ranks of a place: of a pipeline stage and a tensor-parallel rank, or
of a stage and a part of the experts. Its main weight and moments are flat, and data parallelism
alone divides them. Frozen weights and buffers are whole on each rank. They go to the rank with the
same coordinates in the other layout.
"""

from collections.abc import Iterator, Mapping

import torch
from megatron.core import parallel_state as ps
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_rl.process.kept_copies import Span
from mcore_rl.train.lora.turns import Turns
from mcore_rl.train.offload import list_optimizer_tensors
from mcore_rl.train.optimizer import list_own_states, parts_of
from mcore_rl.train.runtime import rank_coordinate


def list_spans(turns: Turns, places: Mapping[int, int]) -> list[Span]:
    """Return the spans of all kept tensors of this rank.

    places   by the key of a storage, where its bytes begin in a copy; storages of tensors that are
             not kept are not in it
    """
    return [
        Span(key, start * tensor.itemsize, start * tensor.itemsize + tensor.nbytes, place)
        for key, start, tensor in _list_own(turns)
        if (place := _find_place(tensor, places)) is not None
    ]


def check_named(turns: Turns) -> None:
    """Raise ValueError if an optimizer has a state that no span has."""
    named = {_find_memory(tensor) for _, _, tensor in _list_own(turns)}
    tensors = (
        tensor
        for learner in turns.learners.values()
        for tensor in list_optimizer_tensors(learner.optimizer)
        if tensor.numel()
    )
    shapes = [tuple(tensor.shape) for tensor in tensors if _find_memory(tensor) not in named]
    if shapes:
        raise ValueError(
            f"the optimizer has states that belong to no parameter (of shapes {shapes[:3]}), and"
            " other ranks could not take them over: set run.recovery.min_dp=null"
        )


def _find_memory(tensor: Tensor) -> tuple[int, int]:
    """Return the storage of a tensor and its first byte there, which stay if it is moved out."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.itemsize


def _find_place(tensor: Tensor, places: Mapping[int, int]) -> int | None:
    """Return where the first byte of a tensor lies in a copy; None if it has none there."""
    storage, offset = _find_memory(tensor)
    if storage not in places or not tensor.numel():
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return places[storage] + offset


def _list_own(turns: Turns) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (key, first element in the flat state, the elements that this rank has)."""
    for learner in turns.visit():
        names = {
            id(parameter): f"{number}.{name}"
            for number, chunk in enumerate(learner.chunks)
            for name, parameter in unwrap_model(chunk).named_parameters()
        }
        whose = f"{learner.name}/" if learner.name else ""
        for part in parts_of(learner.optimizer):
            for parameter, start, states in list_own_states(part):
                place = _name_place(parameter)
                for kind, tensor in states.items():
                    yield f"{place}/{whose}{names[id(parameter)]}/{kind}", start, tensor
    here = _name_coordinate()
    for number, chunk in enumerate(turns.chosen.chunks):
        model = unwrap_model(chunk)
        frozen = ((n, p.detach()) for n, p in model.named_parameters() if not p.requires_grad)
        for name, tensor in (*model.named_buffers(), *frozen):
            yield f"{here}/{number}.{name}", 0, tensor


def _name_place(parameter: torch.nn.Parameter) -> str:
    """Return the place whose ranks all have a parameter; megatron-core marks those of experts."""
    stage = f"pp{ps.get_pipeline_model_parallel_rank()}"
    if getattr(parameter, "allreduce", True):
        return f"{stage} tp{ps.get_tensor_model_parallel_rank()}"
    expert = f"ep{ps.get_expert_model_parallel_rank()}"
    return f"{stage} {expert} etp{ps.get_expert_tensor_parallel_rank()}"


def _name_coordinate() -> str:
    here = rank_coordinate()
    etp = ps.get_expert_tensor_parallel_rank()
    return f"pp{here.pp} dp{here.dp} cp{here.cp} tp{here.tp} ep{here.ep} etp{etp}"
