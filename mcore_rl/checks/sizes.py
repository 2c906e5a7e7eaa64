"""Checks of a recipe's sizes against one another and the model; errors name both and a remedy."""

import re

from mcore_rl.checks.engines import check_lens, check_served
from mcore_rl.config import (
    CriticConfig,
    DataConfig,
    DriftConfig,
    EvalConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.weights.box import Box
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.low_precision import Precision, check_whole, is_rounded
from mcore_rl.weights.layouts.layout import Layout
from mcore_rl.weights.layouts.listed import join_rows
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.layouts.sglang import SGLangLayout
from mcore_rl.weights.layouts.sglang_models import SGLangSizes, refuse_unserved
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.models.recipe_checks import check_layout, check_sharing


def check_sizes(
    policy: ModelFacts,
    parallel: ParallelConfig,
    critic: CriticConfig | None,
    train: TrainConfig,
    rollout: RolloutConfig,
    data: DataConfig,
    ranks_per_host: int,
) -> None:
    """Raise ValueError if a layout does not divide the model, or sequences are too long.

    critic   None if the algorithm has none

    Likewise if sequences are to share beginnings and cannot, or if the ranks of a tensor-parallel
    group do not fit one host.
    """
    check_layout(policy.config, parallel)
    _check_hosts(parallel, "parallel", ranks_per_host)
    if train.share_prefixes:
        check_sharing(policy.config, parallel)
    if train.fake_quantization != "none":
        check_rounding(policy, parallel, train.fake_quantization)
    if rollout.quantization == "int4":
        check_rounding(policy, parallel, "int4", "rollout.quantization")
    if critic is not None:
        if train.share_prefixes:
            check_sharing(policy.config, critic.parallel, "critic.parallel")
        check_layout(policy.config, critic.parallel, "critic.parallel")
        _check_hosts(critic.parallel, "critic.parallel", ranks_per_host)
    check_lens(data, rollout, train, policy)


def check_rounding(
    policy: ModelFacts,
    parallel: ParallelConfig,
    precision: Precision,
    option: str = "train.fake_quantization",
) -> None:
    """Raise ValueError if trainer ranks cannot round the model's weights to `precision`.

    option   that asks for it
    """
    chosen = f"{option}={precision} with model.path={policy.path}"
    if policy.stacks_experts:
        raise ValueError(
            f"{chosen}, whose experts are stacked in one tensor: only none is supported"
        )
    if policy.has_tower and precision == "fp8":
        raise ValueError(f"{chosen}: engines in fp8 serve no vision tower; use int4 or none")
    if not any(is_rounded(precision, name) for name in hf_tensor_shapes(policy.config)):
        raise ValueError(f"{chosen}: the model has no routed experts, which int4 is for; use none")
    sizes = MegatronSizes.from_config(parallel, policy.config)
    layout = MegatronLayout(policy.family, policy.config, sizes, "bfloat16")
    _check_whole_parts(policy, layout, precision, chosen, "trainer")


def _check_whole_parts(
    policy: ModelFacts, layout: Layout, precision: Precision, chosen: str, side: str
) -> None:
    """Raise ValueError that begins with `chosen` if a rank's part of a matrix cuts a block or a
    group of columns.

    One matrix of each kind is looked at: those of other layers and experts are cut alike.
    """
    shapes = hf_tensor_shapes(policy.config)
    rounded = [name for name in shapes if is_rounded(precision, name)]
    for name in {re.sub(r"\d+", "", name): name for name in rounded}.values():
        for piece in join_rows(layout.placement(name)).pieces:
            box = Box(name, piece.start, piece.stop)
            try:
                check_whole(precision, box, shapes[name], f"{side} rank {piece.ranks[0]}")
            except ValueError as error:
                raise ValueError(f"{chosen}: {error}") from None


def _check_hosts(parallel: ParallelConfig, group: str, ranks_per_host: int) -> None:
    tp = parallel.tp
    for first in range(0, parallel.world_size, tp):
        last = first + tp - 1
        if first // ranks_per_host != last // ranks_per_host:
            raise ValueError(
                f"{group}.tp={tp} puts ranks {first} to {last}, which exchange activations in every"
                f" layer, on two hosts of plan.ranks_per_host={ranks_per_host} GPUs: take a divisor"
                f" of it, or set plan.ranks_per_host to the GPUs of a host"
            )


def check_engines(
    policy: ModelFacts,
    dtype: str,
    rollout: RolloutConfig,
    drift: DriftConfig,
    data: DataConfig,
    evaluation: EvalConfig,
) -> None:
    """Raise ValueError if engines of these sizes cannot serve the model, or not rightly.

    dtype   model.dtype
    """
    check_served(policy, rollout, drift, data, evaluation)
    sizes = SGLangSizes.from_config(rollout)
    try:
        refuse_unserved(policy.config, sizes, dtype)
    except ValueError as error:
        raise ValueError(f"model.path={policy.path} in the recipe's engines: {error}") from None
    if rollout.quantization == "int4":
        chosen = f"rollout.quantization=int4 with model.path={policy.path}"
        layout = SGLangLayout(policy.family, policy.config, sizes, dtype)
        _check_whole_parts(policy, layout, "int4", chosen, "engine")
