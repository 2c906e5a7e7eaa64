"""A policy with a batch, a critic that counts, and the options of a step, for the loop's tests."""

from typing import Any

from torch import Tensor

from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.batches.batch import make_train_batch
from mcore_rl.config import AlgorithmConfig, Config
from mcore_rl.loops.training import StepOptions
from mcore_rl.types import StepStats, TrainBatch
from tests.support.table_policy import TablePolicy, make_prompts, repeats_the_prompt


class CountingCritic:
    """Values are the token ids; counts its optimizer steps."""

    def __init__(self) -> None:
        self.num_steps = 0

    def compute_values(self, batch: TrainBatch) -> Tensor:
        return batch.token_ids_T.float()

    def train_step(self, batch: TrainBatch) -> StepStats:
        self.num_steps += 1
        return StepStats(0.5, 1.0, 1e-5, sum(batch.lens_N), {"value": 1.0})

    def save(self, step: int) -> None: ...


def options_of(algorithm: AlgorithmConfig, **config: Any) -> StepOptions:
    return StepOptions.of(Config(algorithm=algorithm, **config), needs_of(algorithm))


def sampled(algorithm: AlgorithmConfig) -> tuple[TablePolicy, TrainBatch]:
    """A policy and a batch of 8 sequences with advantages."""
    policy = TablePolicy(make_policy_loss(algorithm))
    samples = policy.generate(make_prompts(4), 2, greedy=False, seed=0)
    batch, _ = Advantages(AlgorithmConfig())(
        repeats_the_prompt(samples), samples, make_train_batch(samples)
    )
    policy.calls.clear()
    return policy, batch
