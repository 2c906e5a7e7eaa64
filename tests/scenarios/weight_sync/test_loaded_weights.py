"""The first sync of a run: what the trainer sends is what the engine's own loader made of the same
checkpoint, or the engine does not take it.
"""

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mcore_rl.tools.doctor.toy_engine import ToySizes, make_tensors
from mcore_rl.weight_sync.controller.sync import SyncController, SyncError
from tests.support.thread_engines import ThreadStage, open_thread_stage

TIMEOUT_S = 60.0
SIZES = ToySizes(experts=128)

Plant = Callable[[dict[str, Tensor]], None]
"""Changes what a table or a gather of the trainer takes for the checkpoint's tensors."""


def swap_an_expert(weights: dict[str, Tensor]) -> None:
    """One expert of 128 has the weights of another."""
    name = next(name for name in weights if "experts.77.down_proj" in name)
    weights[name] = weights[name.replace(".77.", ".78.")].clone()


def zero_a_slice(weights: dict[str, Tensor]) -> None:
    name = next(name for name in weights if "q_proj" in name)
    weights[name][2:4] = 0


def take_old_weights(weights: dict[str, Tensor]) -> None:
    """Each weight is off by a hundredth of its size: more than bfloat16 rounds away."""
    for name, tensor in weights.items():
        weights[name] = tensor * 1.01


PLANTS = {
    "expert": (swap_an_expert, r"experts\.77\.down_proj"),
    "zeroed slice": (zero_a_slice, "q_proj"),
    "stale": (take_old_weights, r"; (\d+) of \1 slices differ"),
}


def load_into_engines(stage: ThreadStage, plant: Plant | None = None) -> None:
    """Have the engines load what the trainer ranks hold, but for what `plant` changes."""
    weights = {name: tensor.clone() for name, tensor in make_tensors(0, SIZES).items()}
    if plant is not None:
        plant(weights)
    for engine in stage.engines:
        for model in engine.models:
            model.load_weights(weights.items())


def link(stage: ThreadStage, *, staged: bool = True, loaded: bool = True) -> SyncController:
    controller = SyncController(
        stage.trainers, timeout_s=TIMEOUT_S, staged=staged, loaded=loaded, verify_every=1
    )
    asyncio.run(controller.connect(stage.urls))
    return controller


@pytest.mark.parametrize(
    ("dtype", "staged"),
    [
        (torch.bfloat16, True),
        (torch.float32, False),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_both_sides_loaded_alike_is_taken(dtype: torch.dtype, staged: bool) -> None:
    """Trainer ranks hold float32, from which both sides round to bfloat16 alike."""
    with open_thread_stage(2, 1, dtype=dtype, sizes=SIZES) as stage:
        load_into_engines(stage)
        controller = link(stage, staged=staged)
        assert asyncio.run(controller.sync(0)).verified == set(stage.urls)
        stage.trainers.load(1)
        assert not asyncio.run(controller.sync(1)).failed
        assert all(engine.holds(1) for engine in stage.engines)


@pytest.mark.parametrize("staged", [True, False], ids=["staged", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("plant", "named"), PLANTS.values(), ids=PLANTS.keys())
def test_a_fault_of_the_trainers_table_is_named_at_the_first_sync(
    plant: Plant, named: str, dtype: torch.dtype, staged: bool
) -> None:
    with open_thread_stage(1, dtype=dtype, sizes=SIZES) as stage:
        (engine,) = stage.engines
        load_into_engines(stage, plant)
        controller = link(stage, staged=staged)
        with pytest.raises(SyncError, match=named) as caught:
            asyncio.run(controller.sync(0))
        assert "the engine loaded other weights from the checkpoint" in str(caught.value)
        assert "sync.verify=transfer turns the comparison off" in str(caught.value)
        assert engine.version != "0" and controller.linked == ()


def test_engines_that_were_not_to_load_the_checkpoint_are_not_compared() -> None:
    with open_thread_stage(1, sizes=SIZES) as stage:
        load_into_engines(stage, swap_an_expert)
        assert not asyncio.run(link(stage, loaded=False).sync(0)).failed


def test_an_engine_that_comes_later_is_not_compared() -> None:
    """The trainer has taken steps by then, or may have."""
    with open_thread_stage(1, 1, sizes=SIZES) as stage:
        load_into_engines(stage)
        controller = link(stage)
        first, later = stage.urls
        asyncio.run(controller.sync(0, [first]))
        asyncio.run(controller.connect([later]))
        stage.trainers.load(1)
        assert not asyncio.run(controller.sync(1)).failed
        assert all(engine.holds(1) for engine in stage.engines)
