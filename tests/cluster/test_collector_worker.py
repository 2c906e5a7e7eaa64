"""The worker of a collector without Ray: rewards, a teacher's column, whole samples."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mcore_rl.cluster.collector_worker import CollectorSpec, CollectorWorker
from mcore_rl.config import RolloutConfig
from mcore_rl.data.kept_rows import TEACHER_LOGPROBS, ReadRequest
from mcore_rl.process import redaction
from mcore_rl.scores import Scores
from mcore_rl.types import Sample
from tests.support.stored import make_stored


def lengths(samples: list[Sample]) -> Scores:
    return Scores([float(sample.response_len) for sample in samples])


def make_worker(**options: Any) -> tuple[CollectorWorker, list[Any]]:
    spec = CollectorSpec(RolloutConfig(), (9,), str, None, lambda: lengths, **options)
    worker = CollectorWorker(spec)
    stores, _, rows = make_stored(seed=8, num_stores=1)
    worker._store = stores.stores[0]
    return worker, rows


def where(rows: list[Any]) -> tuple[list[int], list[int]]:
    return [row.lease.group for row in rows], [row.sample_index for row in rows]


def test_samples_are_scored_in_the_order_that_is_asked_for() -> None:
    worker, rows = make_worker()
    scores = worker.score(*where(rows))
    assert scores.rewards_N == [float(row.response_len) for row in rows]
    whole = worker.samples(*where(rows[:2]))
    assert [s.response_len for s in whole] == [row.response_len for row in rows[:2]]
    assert all(sample.routed_experts is None for sample in whole)


def test_a_teachers_log_probs_become_a_column() -> None:
    worker, rows = make_worker()
    worker._teacher = lambda samples: [[-1.0 - i] * s.response_len for i, s in enumerate(samples)]
    group_N, index_N = where(rows[:3])
    worker.ask_teacher(group_N, index_N)
    request = ReadRequest(np.array(group_N), np.array(index_N), (TEACHER_LOGPROBS,))
    columns: Mapping[str, Any] = worker.read(request)
    expected: list[float] = []
    for i, row in enumerate(rows[:3]):
        expected += [0.0] * len(row.prompt.token_ids) + [-1.0 - i] * row.response_len
    assert columns[TEACHER_LOGPROBS].tolist() == expected


def test_the_runs_secrets_are_hidden_here_too() -> None:
    make_worker(secrets=("planted-in-the-recipe",))
    assert redaction.redact("it is planted-in-the-recipe") == "it is ***"
    redaction._known.discard("planted-in-the-recipe")
