"""Predicts the seconds that states in partner memory and checkpoints cost, from bytes and speeds.

after each step         keep: the state is copied to host memory, and its digest computed
beside the weight sync  mirror: the copy goes to the partner node over the rank's link
after a loss            notice, replace processes, fetch from the partner, check, copy back
without partner memory  queue again, start processes, read the checkpoint from storage
"""

from dataclasses import dataclass

from mcore_rl.config import Config, PlanConfig, SimulateConfig
from mcore_rl.config.run import RecoveryConfig
from mcore_rl.planning.kept_state import predict_kept_states
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.tools.simulate.costs import RecipeCosts, TrainCosts

COPY_BYTES_S = 25e9
"""Speed at which a rank copies its state to pinned host memory behind PCIe 5.0."""
DIGEST_BYTES_S = 30e9
"""Speed of xxh3 on several cores."""


@dataclass(frozen=True)
class RecoveryCosts:
    """Seconds of a recovery from partner memory, and of what makes it possible.

    keep_s      of the ranks after each step
    mirror_s    until the copy is on the partner node, in the background
    notice_s    until a loss is noticed
    replace_s   until new processes have built the model
    load_s      to fetch a rank's state from the partner node, to check it and to copy it back
    """

    keep_s: float
    mirror_s: float
    notice_s: float
    replace_s: float
    load_s: float

    @staticmethod
    def make(
        rank_bytes: float, simulate: SimulateConfig, plan: PlanConfig, network: float
    ) -> "RecoveryCosts":
        """`rank_bytes`: the state of the largest rank; `network`: share of its link's speed."""
        copy_s = rank_bytes / COPY_BYTES_S + rank_bytes / DIGEST_BYTES_S
        mirror_s = rank_bytes / (plan.link_gbps * 1e9 / 8 * network)
        return RecoveryCosts(
            copy_s, mirror_s, simulate.notice_s, simulate.replace_s, copy_s + mirror_s
        )

    @staticmethod
    def predict(config: Config, costs: RecipeCosts) -> "RecoveryCosts":
        """Return the costs of a recipe's ranks as if run.recovery.partner were memory."""
        kept = predict_kept_states(PlannedRun.make(config), RecoveryConfig())
        rank_bytes = max(state.rank_bytes for state in kept)
        network = costs.trainer.shares.network
        return RecoveryCosts.make(rank_bytes, config.simulate, config.plan, network)

    @property
    def recovery_s(self) -> float:
        """Seconds from a loss until all ranks have their state."""
        return self.notice_s + self.replace_s + self.load_s


@dataclass(frozen=True)
class CheckpointCosts:
    """Seconds of checkpoints of trainer and critic.

    save_s   for which training pauses
    write_s  until what was saved is on storage, from then on
    load_s   to read a checkpoint
    """

    save_s: float
    write_s: float
    load_s: float

    @staticmethod
    def predict(config: Config, costs: RecipeCosts) -> "CheckpointCosts":
        models = [costs.trainer] if costs.critic is None else [costs.trainer, costs.critic]
        save_s = sum(model.save_s for model in models)
        machine_bytes = sum(_count_machine_bytes(model, config.plan) for model in models)
        storage_s = machine_bytes / (config.simulate.storage_gbps * 1e9 / 8)
        if config.checkpoint.asynchronous:
            return CheckpointCosts(save_s, storage_s, storage_s)
        return CheckpointCosts(save_s + storage_s, 0.0, storage_s)


def _count_machine_bytes(model: TrainCosts, plan: PlanConfig) -> float:
    """Return the bytes of a checkpoint that the ranks of one machine write."""
    return model.saved_bytes * min(plan.ranks_per_host, model.parallel.world_size)
