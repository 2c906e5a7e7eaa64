"""A policy with a batch, a critic that counts, and the options of a step, for the loop's tests."""

from dataclasses import replace
from typing import Any

from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.batches.stored_batch import make_stored_batch
from mcore_rl.config import AlgorithmConfig, CriticConfig, TrainConfig
from mcore_rl.logs.ledger.ledger import RunLedger
from mcore_rl.loops.roles import NO_RECOVERY, Roles, in_turn
from mcore_rl.loops.training import StepOptions
from mcore_rl.run.roles.advantages import StoredAdvantages
from mcore_rl.run.roles.local_trainer import LocalTrainer
from mcore_rl.types import StepStats, StoredBatch, StoredColumn, StoredSample, TrainBatch
from tests.support.table_policy import TablePolicy, make_prompts, repeats_the_prompt


class CountingCritic:
    """Values are the token ids; counts its optimizer steps."""

    def __init__(self, stores: LocalStores) -> None:
        self.num_steps = 0
        self._stores = stores

    def compute_values(self, batch: StoredBatch) -> StoredColumn:
        [(batch, _)] = self._stores.apply([(_set_values, batch)])
        assert batch.values_T is not None
        return batch.values_T

    def train_step(self, batch: StoredBatch) -> StepStats:
        self.num_steps += 1
        return StepStats(0.5, 1.0, 1e-5, sum(batch.lens_N), {"value": 1.0})

    def save(self, step: int) -> None: ...


def _set_values(batch: TrainBatch) -> tuple[TrainBatch, None]:
    return replace(batch, values_T=batch.token_ids_T.float()), None


def options_of(
    algorithm: AlgorithmConfig, train: TrainConfig | None = None, critic: CriticConfig | None = None
) -> StepOptions:
    return StepOptions(algorithm, train or TrainConfig(), critic or CriticConfig(), 512)


def sampled(algorithm: AlgorithmConfig) -> tuple[TablePolicy, StoredBatch, list[StoredSample]]:
    """Return a policy, a batch of 8 sequences with advantages, and its samples."""
    policy = TablePolicy(make_policy_loss(algorithm))
    samples = policy.generate(make_prompts(4), 2, greedy=False, seed=0)
    scores = policy.reward_by(repeats_the_prompt)(samples)
    advantages = StoredAdvantages(
        Advantages(AlgorithmConfig()), policy.stores.apply, has_teacher=False
    )
    batch, _ = advantages(scores, samples, make_stored_batch(samples))
    policy.calls.clear()
    return policy, batch, samples


def roles_of(policy: TablePolicy, **roles: Any) -> Roles:
    """Return roles with a trainer and a place for tokens, beside those that are given."""
    fields: dict[str, Any] = dict.fromkeys(Roles.__dataclass_fields__)
    own: dict[str, Any] = {
        "trainer": LocalTrainer(policy, policy.stores),
        "on_tokens": policy.stores.apply,
        "recovery": NO_RECOVERY,
        "ledger": RunLedger(),
    }
    given: dict[str, Any] = {**fields, **own, "both": in_turn, **roles}
    return Roles(**given)
