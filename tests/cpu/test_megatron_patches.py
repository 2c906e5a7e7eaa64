"""Every CPU patch of megatron-core is still needed: without it, training fails or goes wrong.

A test that fails here means that upstream made its patch unnecessary: remove the patch.
"""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl import device
from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.cpu import megatron_patches
from mcore_rl.cpu.megatron_patches import PATCHES
from tests.cpu import test_gloo_patches
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)
from tests.support.upstream import assert_defect, fails_without

UNEVEN = {"tp": 2, "ep": 2, "etp": 2}
EP = {"ep": 2}
NEEDED_BY = {
    "alias_streams": EP,
    "alias_rng": EP,
    "alias_factories": EP,
    "alias_tensor_type": EP,
    "convert_alltoall_splits": EP,
    "uneven_collectives": UNEVEN,
    "use_fused_adam": EP,
    "use_te_workalike": EP,
}
"""Patch -> a layout in which a training step fails without it."""
CHECKED_ALONE = {
    "know_linear_in_latent_attention",
    "recompute_by_copy",
    "recompute_without_fp8",
    "contiguous_collectives",
    "buckets_in_place",
    "run_eagerly",
    "allow_precision_aware_adam",
    "use_torch_delta_net",
    "use_torch_mamba",
    "know_linear_in_latent_experts",
}
"""Patches with a test_<name> of their own, below or in test_gloo_patches.py."""


def train_without(
    rank: int,
    world_size: int,
    port: int,
    without: str,
    path: str,
    layout: dict[str, Any],
    root: Path,
) -> float | None:
    """Take a step, save and load with all patches but one; return the loss."""
    for patch in PATCHES:
        if patch.__name__ != without:
            patch()
    device.IN_PLACE.cpu_patches = True
    parallel = ParallelConfig(**layout)
    actor = make_actor(
        rank, world_size, port, ModelConfig(path=path), parallel, recompute="selective"
    )
    stats = actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    actor.save(root / "step", {})
    actor.finish_save()
    actor.load(root / "step")
    return stats and stats.loss


def run(path: str, root: Path, without: str, layout: dict[str, Any]) -> list[float | None]:
    world_size = ParallelConfig(**layout).world_size
    return run_ranks(train_without, world_size, without, path, layout, root, timeout_s=60)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_model(tmp_path_factory.mktemp("model")))


def test_every_patch_has_a_test() -> None:
    assert {patch.__name__ for patch in PATCHES} == NEEDED_BY.keys() | CHECKED_ALONE
    tests = {**vars(test_gloo_patches), **globals()}
    missing = {name for name in CHECKED_ALONE if f"test_{name}" not in tests}
    assert not missing, f"patches without a test: {missing}"


def test_every_function_of_the_modules_that_patch_is_in_the_list() -> None:
    public = {
        name
        for module in (megatron_patches, megatron_patches)
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__module__", "") == module.__name__
        and not name.startswith("_")
    }
    assert public == {patch.__name__ for patch in PATCHES}


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [pytest.param(EP, marks=pytest.mark.slow), UNEVEN], ids=str)
def test_all_patches_together_are_enough(
    model_dir: str, tmp_path: Path, layout: dict[str, Any]
) -> None:
    assert run(model_dir, tmp_path, "none", layout)[0] is not None


@pytest.mark.gloo
@pytest.mark.parametrize("patch", NEEDED_BY)
def test_training_fails_without_the_patch(model_dir: str, tmp_path: Path, patch: str) -> None:
    with fails_without(f"megatron_patches.{patch}", AssertionError):
        run(model_dir, tmp_path, patch, NEEDED_BY[patch])


def made_on_meta(rank: int, world_size: int, port: int) -> str:
    megatron_patches.alias_factories()
    with torch.device("meta"):
        return torch.empty(1).device.type


def test_device_blocks_hold_for_replaced_factories() -> None:
    assert run_ranks(made_on_meta, 1)[0] == "meta"


def in_fresh_process(rank: int, world_size: int, port: int, patch: str) -> dict[str, Any]:
    """Run a probe of an unpatched megatron-core, and again after the patch."""
    probe = PROBES[patch]
    before = _outcome(probe)
    getattr(megatron_patches, patch)()
    return {"before": before, "after": _outcome(probe)}


def _outcome(probe: Any) -> Any:
    try:
        return probe()
    except RuntimeError as error:
        return type(error).__name__


def _takes_linear() -> bool:
    """The condition of MLASelfAttention.__init__ on its projections down."""
    from megatron.core.transformer import multi_latent_attention as module

    from mcore_rl.cpu.te_workalike import DuplicatedLinear

    return DuplicatedLinear in (module.Linear, module.TELinear)


def _recomputes_in_fp8() -> bool:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    return CheckpointWithoutOutput().fp8


def _moments_dtype() -> str:
    from megatron.core.optimizer import OptimizerConfig

    options = OptimizerConfig(
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        exp_avg_dtype=torch.bfloat16,
    )
    return str(options.exp_avg_dtype)


def _has_delta_net() -> bool:
    from megatron.core.ssm.gated_delta_net import common, gdn

    kernels = (common.l2norm, gdn.causal_conv1d, gdn.chunk_gated_delta_rule)
    return common.HAVE_FLA and None not in kernels


def _has_mamba() -> bool:
    from megatron.core.ssm import mamba_mixer

    return mamba_mixer.HAVE_MAMBA_SSM and isinstance(mamba_mixer.ExtendedRMSNorm, type)


def _has_latent_linear() -> bool:
    """One tensor-parallel rank saves the weights of such a TELinear: they are the same on all."""
    from megatron.core.transformer.moe import moe_layer

    from mcore_rl.cpu.te_workalike import DuplicatedLinear

    return moe_layer.HAVE_TE and moe_layer.TELinear is DuplicatedLinear


PROBES = {
    "know_linear_in_latent_experts": _has_latent_linear,
    "use_torch_mamba": _has_mamba,
    "allow_precision_aware_adam": _moments_dtype,
    "know_linear_in_latent_attention": _takes_linear,
    "recompute_without_fp8": _recomputes_in_fp8,
    "use_torch_delta_net": _has_delta_net,
}


def check_outcomes(patch: str, defect: Any, wanted: Any) -> None:
    outcomes = run_ranks(in_fresh_process, 1, patch)[0]
    assert_defect(f"megatron_patches.{patch}", outcomes["before"] == defect)
    assert outcomes["after"] == wanted


def test_know_linear_in_latent_attention() -> None:
    check_outcomes("know_linear_in_latent_attention", False, True)


def test_recompute_without_fp8() -> None:
    check_outcomes("recompute_without_fp8", True, False)


def test_allow_precision_aware_adam() -> None:
    check_outcomes("allow_precision_aware_adam", "RuntimeError", "torch.bfloat16")


def test_use_torch_delta_net() -> None:
    check_outcomes("use_torch_delta_net", False, True)


def test_use_torch_mamba() -> None:
    check_outcomes("use_torch_mamba", False, True)


def test_know_linear_in_latent_experts() -> None:
    check_outcomes("know_linear_in_latent_experts", False, True)


def test_recompute_by_copy() -> None:
    from megatron.core.tensor_parallel import random as tp_random

    source = inspect.getsource(tp_random._get_share_storage)
    assert_defect("megatron_patches.recompute_by_copy", "load_inline" in source)


def test_run_eagerly() -> None:
    from megatron.core import jit

    assert_defect("megatron_patches.run_eagerly", jit.jit_fuser is torch.compile)
