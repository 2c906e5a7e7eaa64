"""Every CPU patch is needed still: without it, training on CPU fails or goes wrong.

A test that fails here means that upstream made its patch unnecessary: remove the patch.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_rl import device
from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.device.cpu_patches import PATCHES
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

UNEVEN = {"tp": 2, "ep": 2, "etp": 2}
EP = {"ep": 2}
NEEDED_BY = {
    "streams": EP,
    "rng": EP,
    "factories": EP,
    "tensor_type": EP,
    "missing_symbols": EP,
    "alltoall_splits": EP,
    "uneven_collectives": UNEVEN,
    "fused_adam": EP,
    "te_workalike": EP,
}
CHECKED_ALONE = {"contiguous_collectives", "eager"}


def train_without(
    rank: int,
    world_size: int,
    port: int,
    without: str,
    path: str,
    layout: dict[str, int],
    root: Path,
) -> float | None:
    """A step, a save and a load with all patches but one."""
    for name, patch in PATCHES.items():
        if name != without:
            patch()
    device._cpu_patches_installed = True
    parallel = ParallelConfig(**layout)
    actor = make_actor(
        rank, world_size, port, ModelConfig(path=path), parallel, recompute="selective"
    )
    stats = actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    actor.save(root / "step", {})
    actor.finish_save()
    actor.load(root / "step")
    return stats and stats.loss


def run(path: str, root: Path, without: str, layout: dict[str, int]) -> list[float | None]:
    world_size = ParallelConfig(**layout).world_size
    return run_ranks(train_without, world_size, without, path, layout, root, timeout_s=60)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_model(tmp_path_factory.mktemp("model")))


def test_every_patch_has_a_test() -> None:
    assert set(PATCHES) == NEEDED_BY.keys() | CHECKED_ALONE


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [EP, UNEVEN], ids=str)
def test_all_patches_together_are_enough(
    model_dir: str, tmp_path: Path, layout: dict[str, int]
) -> None:
    assert run(model_dir, tmp_path, "none", layout)[0] is not None


@pytest.mark.gloo
@pytest.mark.parametrize("patch", NEEDED_BY)
def test_training_fails_without_the_patch(model_dir: str, tmp_path: Path, patch: str) -> None:
    with pytest.raises(AssertionError, match="--- rank"):
        run(model_dir, tmp_path, patch, NEEDED_BY[patch])


def send_strided(
    rank: int, world_size: int, port: int, patched: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rank 1 gets of a broadcast and a scatter of transposed tensors."""
    if patched:
        PATCHES["contiguous_collectives"]()
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    strided = torch.arange(6.0).view(2, 3).t()
    broadcast = strided if rank == 0 else torch.zeros(3, 2)
    dist.broadcast(broadcast, 0)
    scattered = torch.zeros(3, 2)
    dist.scatter(scattered, [strided, strided] if rank == 0 else None, 0)
    return broadcast, scattered


@pytest.mark.gloo
def test_gloo_ignores_strides_without_the_patch() -> None:
    wanted = torch.arange(6.0).view(2, 3).t()
    assert all(torch.equal(got, wanted) for got in run_ranks(send_strided, 2, True)[1])
    assert not any(torch.equal(got, wanted) for got in run_ranks(send_strided, 2, False)[1])


def test_megatron_would_compile_without_the_patch() -> None:
    from megatron.core import jit

    assert jit.jit_fuser is torch.compile
