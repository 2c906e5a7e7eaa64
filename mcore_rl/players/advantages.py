"""Computes advantages of stored samples: by sample here, by token where the tokens are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from mcore_rl.algo.estimator import Advantages, SampleShapes
from mcore_rl.data.kept_rows import TEACHER_LOGPROBS
from mcore_rl.data.stored_batch import by_sequence
from mcore_rl.roles import OnTokens
from mcore_rl.scores import Scores
from mcore_rl.types import StoredBatch, StoredColumn, StoredSample


class StoredAdvantages:
    """Plays roles.AdvantageEstimator for stored samples."""

    def __init__(self, advantages: Advantages, on_tokens: OnTokens, *, has_teacher: bool) -> None:
        """`has_teacher`: the stores hold a teacher's log-probs of the samples."""
        self._advantages = advantages
        self._on_tokens = on_tokens
        self._has_teacher = has_teacher

    def __call__(
        self, scores: Scores, samples: Sequence[StoredSample], batch: StoredBatch
    ) -> tuple[StoredBatch, dict[str, float]]:
        if self._advantages.are_by_sample:
            has_tokens_N = np.array([sample.response_len > 0 for sample in samples])
            advantages_N = self._advantages.of_samples(scores, samples).numpy()
            own_N = by_sequence(batch, advantages_N[has_tokens_N])
            return replace(batch, advantages_N=own_N), {}
        if self._has_teacher:
            batch = replace(batch, teacher_logprobs_T=StoredColumn(TEACHER_LOGPROBS))
        shapes = SampleShapes.of(samples)
        estimate = partial(self._advantages.estimate, shapes=shapes, scores=scores)
        batch, metrics = self._on_tokens(estimate, batch)
        self._advantages.steer(metrics, len(samples))
        return batch, metrics

    def state_dict(self) -> dict[str, float]:
        return self._advantages.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._advantages.load_state_dict(state)
