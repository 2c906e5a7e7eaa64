"""Predicts the host memory that trainer and critic ranks keep their states in, for recoveries."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.config import ParallelConfig, TrainConfig
from mcore_rl.config.run import RecoveryConfig
from mcore_rl.planning.adapter_memory import count_adapter
from mcore_rl.planning.host_memory import GIB
from mcore_rl.planning.memory import count_parameters, predict_critic, predict_trainer
from mcore_rl.planning.peak_memory import Uses
from mcore_rl.planning.recipe_models import PlannedRun, make_critic_training
from mcore_rl.planning.resident_memory import NO_LINKS
from mcore_rl.process.kept_memory import NUM_COPIES
from mcore_rl.weights.box import itemsize
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.models import family_of
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.value_head import add_value_head


@dataclass(frozen=True)
class KeptState:
    """The states that the ranks of one model keep; `rank_bytes`: one copy of the largest rank."""

    role: str
    rank_bytes: float
    num_ranks: int


def predict_kept_states(run: PlannedRun, recovery: RecoveryConfig) -> list[KeptState]:
    """Return what trainer and critic keep; [] if lost ranks are not recovered."""
    if not recovery.is_used:
        return []
    policy = run.models.policy.choose_trained(run.train.mtp_loss).config
    uses = predict_trainer(run, NO_LINKS)
    trainer = _find_largest(run.dtype, policy, run.parallel, uses, run.train)
    kept = [KeptState("trainer", trainer, run.parallel.world_size)]
    if run.critic is not None and run.models.critic is not None:
        config, parallel = add_value_head(run.models.critic.config), run.critic.parallel
        train = make_critic_training(run.train, run.critic)
        critic = _find_largest(run.dtype, config, parallel, predict_critic(run), train)
        kept.append(KeptState("critic", critic, parallel.world_size))
    return kept


def _find_largest(
    dtype: str,
    hf_config: HfConfig,
    parallel: ParallelConfig,
    stages: Sequence[Uses],
    train: TrainConfig,
) -> float:
    """Return the bytes of a copy of the stage that has most.

    Main weights and moments are kept, and the weights that these do not give: frozen ones, and all
    of a model in float32, which are the main weights. With low-rank factors these are the factors:
    all weights below them come from model.path again.
    """
    sizes = MegatronSizes.from_config(parallel, hf_config)
    layout = MegatronLayout(family_of(hf_config), hf_config, sizes, dtype)
    most = 0.0
    for stage, uses in enumerate(stages):
        count = count_parameters(layout, sizes, stage, train.vision)
        frozen = count.frozen * itemsize(dtype)
        if train.lora.rank:
            adapter = count_adapter(hf_config, layout, sizes, stage, train.lora)
            frozen = 0
            uses = {**uses, "weights": adapter.num_trained * itemsize(dtype)}
        weights = uses["weights"] if dtype == "float32" else frozen
        most = max(most, uses["optimizer"] + weights)
    return most


def explain_kept_states(kept: Sequence[KeptState], ranks_per_host: int) -> str:
    """Return a sentence with the memory of the states; "" if there are none."""
    if not kept:
        return ""
    parts = []
    for state in kept:
        on_host = min(ranks_per_host, state.num_ranks)
        gib = NUM_COPIES * state.rank_bytes / GIB
        parts.append(
            f"{gib:.1f} GiB for each {state.role} rank, {gib * on_host:.1f} GiB on a host of"
            f" {on_host}"
        )
    return (
        f"Recovery of lost ranks: {NUM_COPIES} copies of their states in host memory,"
        f" {'; '.join(parts)}. run.recovery.partner=none keeps none."
    )
