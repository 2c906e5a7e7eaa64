"""Computes advantages of stored samples: by sample in this process, by token in the stores.

parts of the step, whole prompts each  --compute_from_tokens-->  columns in the stores, sums here
                                       --normalize-->            columns in the stores
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from mcore_rl.algo.batch_outcomes import SampleShapes
from mcore_rl.algo.estimator import NO_SUMS, Advantages, PartSums, join_sums
from mcore_rl.batches.kept_rows import TEACHER_LOGPROBS
from mcore_rl.batches.stored_batch import (
    PART_TOKENS,
    StepPart,
    by_sequence,
    cut_by_prompts,
    take_whole,
)
from mcore_rl.loops.roles import OnTokens
from mcore_rl.types import StoredBatch, StoredColumn, StoredSample
from mcore_rl.types.scores import Scores


class StoredAdvantages:
    """Implements roles.AdvantageEstimator."""

    def __init__(
        self,
        advantages: Advantages,
        on_tokens: OnTokens,
        *,
        has_teacher: bool,
        part_tokens: int = PART_TOKENS,
    ) -> None:
        """`has_teacher`: the stores hold a teacher's log-probs of the samples.

        part_tokens   the most tokens of a part, unless a prompt's samples have more
        """
        self._advantages = advantages
        self._on_tokens = on_tokens
        self._has_teacher = has_teacher
        self._part_tokens = part_tokens

    def __call__(
        self, scores: Scores, samples: Sequence[StoredSample], batch: StoredBatch
    ) -> tuple[StoredBatch, dict[str, float]]:
        advantages = self._advantages
        sums = NO_SUMS
        if advantages.need_tokens:
            batch, sums = self._compute_on_tokens(scores, samples, batch)
        metrics = advantages.summarize(scores, samples, sums)
        if advantages.sees == "samples":
            has_tokens_N = np.array([sample.response_len > 0 for sample in samples])
            advantages_N = advantages.compute_from_samples(scores, samples, sums).numpy()
            batch = replace(batch, advantages_N=by_sequence(batch, advantages_N[has_tokens_N]))
        advantages.steer(metrics, len(samples))
        return batch, metrics

    def state_dict(self) -> dict[str, float]:
        return self._advantages.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._advantages.load_state_dict(state)

    def _compute_on_tokens(
        self, scores: Scores, samples: Sequence[StoredSample], batch: StoredBatch
    ) -> tuple[StoredBatch, PartSums]:
        """Return the batch with its columns of advantages and returns, and the sums of the step."""
        if self._has_teacher:
            batch = replace(batch, teacher_logprobs_T=StoredColumn(TEACHER_LOGPROBS))
        parts = self._cut(batch, samples)
        made, answers = self._compute(scores, samples, parts)
        sums = join_sums(answers, [part.places for part in parts], len(samples))
        if self._advantages.are_normalized:
            normalize = partial(self._advantages.normalize, sums=sums)
            self._on_tokens([(normalize, _only_advantages(part)) for part in made])
        names = ("advantages_T", "returns_T")
        return replace(batch, **{name: getattr(made[0], name) for name in names}), sums

    def _cut(self, batch: StoredBatch, samples: Sequence[StoredSample]) -> list[StepPart]:
        """Return the parts of a step, each of which one function call gets."""
        if self._advantages.sees == "step":
            return take_whole(batch, samples)
        return cut_by_prompts(batch, samples, self._part_tokens)

    def _compute(
        self, scores: Scores, samples: Sequence[StoredSample], parts: Sequence[StepPart]
    ) -> tuple[list[StoredBatch], list[PartSums]]:
        """Return the batch and the sums of each part."""
        works = []
        for part in parts:
            shapes = SampleShapes.from_samples([samples[place] for place in part.places])
            own = scores.select(part.places)
            estimate = partial(self._advantages.compute_from_tokens, shapes=shapes, scores=own)
            works.append((estimate, part.batch))
        made, answers = zip(*self._on_tokens(works), strict=True)
        return list(made), list(answers)


def _only_advantages(batch: StoredBatch) -> StoredBatch:
    """Return the batch without all stored columns except advantages and the loss mask."""
    stored = [name for name, value in vars(batch).items() if isinstance(value, StoredColumn)]
    unread = dict.fromkeys(stored)
    kept = {"advantages_T": batch.advantages_T, "loss_mask_T": batch.loss_mask_T}
    return replace(batch, version=None, **{**unread, **kept})
