"""The batch that a step trains on of samples and scores that are given, by table_policy.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.config import AlgorithmConfig, Config
from mcore_rl.logs.logger import PhaseTimer
from mcore_rl.loops.rl import make_step_options, run_step
from mcore_rl.loops.roles import Roles
from mcore_rl.run.roles.advantages import StoredAdvantages
from mcore_rl.types import StoredBatch, StoredSample, TrainBatch, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.optimizer_steps import roles_of
from tests.support.table_policy import MemoryLog, TablePolicy, make_prompts


@dataclass
class GivenSamples:
    """Implements roles.Background with samples that are there already."""

    samples: list[StoredSample]
    scores: Scores
    kept: list[int] = field(default_factory=list)
    """Steps whose saves it was told of."""

    def take(self, version: WeightVersion) -> tuple[list[StoredSample], Scores, dict[str, float]]:
        return self.samples, self.scores, {}

    def pause_for_sync(self) -> None: ...

    def keep(self, step: int) -> None:
        self.kept.append(step)

    def resume(self, version: WeightVersion) -> Mapping[str, float]:
        return {}


class KeepingAdvantages(StoredAdvantages):
    """Keeps the samples and scores that it was called with last."""

    samples: list[StoredSample]
    scores: Scores

    def __call__(
        self, scores: Scores, samples: Any, batch: StoredBatch
    ) -> tuple[StoredBatch, dict[str, float]]:
        self.samples = list(samples)
        self.scores = scores
        return super().__call__(scores, samples, batch)


def take_step(roles: Roles, algorithm: AlgorithmConfig, **config: Any) -> dict[str, float]:
    """Take step 1 of the loop with these roles, and return its metrics."""
    drawing, options = make_step_options(Config(algorithm=algorithm, **config))
    return run_step(drawing, options, roles, PhaseTimer(1), seed=0)


def prepared(
    policy: TablePolicy, algorithm: AlgorithmConfig, samples: list[StoredSample], scores: Scores
) -> tuple[list[StoredSample], Scores, TrainBatch]:
    """Return samples, scores and batch as a step of `algorithm` trains on them."""
    policy.loss = make_policy_loss(algorithm)
    advantages = KeepingAdvantages(Advantages(algorithm), policy.stores.apply, has_teacher=False)
    roles = roles_of(
        policy,
        generator=policy,
        weights=policy,
        log=MemoryLog(),
        advantages=advantages,
        background=GivenSamples(samples, scores),
    )
    take_step(roles, algorithm)
    return advantages.samples, advantages.scores, policy.batches[-1]


def advantages_of(batch: TrainBatch) -> list[float]:
    """Return the advantage of each sequence, at its last token."""
    assert batch.advantages_T is not None
    ends = np.cumsum(batch.lens_N) - 1
    return batch.advantages_T[torch.tensor(ends)].tolist()


def group_of(size: int) -> tuple[TablePolicy, list[StoredSample]]:
    """Return a policy and its samples of one prompt."""
    policy = TablePolicy(make_policy_loss(AlgorithmConfig()))
    return policy, policy.generate(make_prompts(1), size, greedy=False, seed=0)
