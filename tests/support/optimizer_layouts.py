"""Steps of a tiny model with any optimizer, in any layout, saved and continued in another one."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.train.actor import Actor
from mcore_rl.types import StepStats
from tests.support.gradients import boxed_gradients
from tests.support.tiny_training import NUM_TOKENS, make_actor, my_batches, token_loss


def step(actor: Actor) -> StepStats | None:
    return actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)


def name_of(layout: dict[str, Any]) -> str:
    return "_".join(f"{name}{size}" for name, size in layout.items()) or "one"


def take_steps(
    rank: int,
    world_size: int,
    port: int,
    model: ModelConfig,
    root: Path,
    optimizer: OptimizerConfig,
    layout: dict[str, Any],
) -> Any:
    """Take a step, save, and take two more; weights lie in `root` after the first and the last."""
    overlap = {"ddp": {"overlap_grad_reduce": True}} if layout.get("dp") else {}
    actor = make_actor(
        rank, world_size, port, model, ParallelConfig(**layout), optimizer, **overlap
    )
    stats = [step(actor)]
    gradients = boxed_gradients(actor)
    folder = root / name_of(layout)
    actor.export_hf(folder / "first")
    actor.save(folder / "checkpoint", {})
    stats += [step(actor), step(actor)]
    actor.finish_save()
    actor.export_hf(folder / "last")
    return gradients, stats


def resume(
    rank: int,
    world_size: int,
    port: int,
    model: ModelConfig,
    root: Path,
    optimizer: OptimizerConfig,
    layout: dict[str, Any],
    saved: str,
) -> None:
    """Take the last two steps from a checkpoint of another layout."""
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout), optimizer)
    actor.load(root / saved / "checkpoint")
    for _ in range(2):
        step(actor)
    actor.export_hf(root / f"{saved}_in_{name_of(layout)}")


def read(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}
