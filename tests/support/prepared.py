"""Batches of one group, as a step trains on them, made by the policy of table_policy.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.config import AlgorithmConfig, Config
from mcore_rl.logs import PhaseTimer
from mcore_rl.loops.roles import Roles, in_turn
from mcore_rl.loops.training import StepOptions, prepare_batch
from mcore_rl.types import Sample, TrainBatch
from mcore_rl.types.scores import Scores
from tests.support.table_policy import TablePolicy, make_prompts


def prepared(
    algorithm: AlgorithmConfig, samples: Sequence[Sample], scores: Scores
) -> tuple[Sequence[Sample], Scores, TrainBatch]:
    """Return samples, scores and batch as a step of `algorithm` trains on them."""
    policy = TablePolicy(make_policy_loss(algorithm))
    fields: dict[str, Any] = dict.fromkeys(Roles.__dataclass_fields__)
    given = {"trainer": policy, "advantages": Advantages(algorithm), "both": in_turn}
    roles = Roles(**fields | given)
    left, scores, batch, _ = prepare_batch(
        StepOptions.of(Config(algorithm=algorithm), needs_of(algorithm)),
        roles,
        PhaseTimer(1),
        samples,
        scores,
    )
    return left, scores, batch


def advantages_of(batch: TrainBatch) -> list[float]:
    """Return the advantage of each sequence, at its last token."""
    assert batch.advantages_T is not None
    ends = np.cumsum(batch.lens_N) - 1
    return batch.advantages_T[torch.tensor(ends)].tolist()


def group_of(size: int) -> list[Sample]:
    return TablePolicy(make_policy_loss(AlgorithmConfig())).generate(
        make_prompts(1), size, greedy=False, seed=0
    )
