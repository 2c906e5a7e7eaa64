"""The worker of a collector without Ray: rewards, a teacher's column, whole samples."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from mcore_rl.batches.episodes import LOSS_MASK, TOKEN_IDS
from mcore_rl.batches.kept_rows import TEACHER_LOGPROBS, ReadRequest
from mcore_rl.batches.sample_store import SampleStore
from mcore_rl.config import RolloutConfig
from mcore_rl.process import redaction
from mcore_rl.types import Prompt, Sample
from mcore_rl.types.scores import Scores
from mcore_rl.workers.collector_worker import CollectorSpec, CollectorWorker
from tests.support.stored import make_stored
from tests.support.turn_trees import random_tree, sample_of


def lengths(samples: list[Sample]) -> Scores:
    return Scores([float(sample.response_len) for sample in samples])


def make_worker(**options: Any) -> tuple[CollectorWorker, list[Any]]:
    spec = CollectorSpec(RolloutConfig(), (9,), str, None, lambda: lengths, **options)
    worker = CollectorWorker(spec, 0, 0, lambda array: array)
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


def score_ids(samples: list[Sample]) -> list[list[float]]:
    """A teacher to whom the log-prob of token t is -t."""
    return [[-float(token) for token in sample.response_ids] for sample in samples]


def check_teacher(worker: CollectorWorker, rows: list[tuple[int, int, int, int]]) -> None:
    """`rows` are (group, number, length, first trained token), before which nothing is scored."""
    group_N, row_N, lens_N, starts_N = (list(column) for column in zip(*rows, strict=True))
    worker.ask_teacher(group_N, row_N, lens_N)
    request = ReadRequest(np.array(group_N), np.array(row_N), (TOKEN_IDS, TEACHER_LOGPROBS))
    columns: Mapping[str, Any] = worker.read(request)
    expected = -columns[TOKEN_IDS].astype(np.float32)
    for first, start in zip(np.cumsum([0, *lens_N[:-1]]), starts_N, strict=True):
        expected[first : first + start] = 0.0
    assert columns[TEACHER_LOGPROBS].tolist() == expected.tolist()


def test_a_teachers_log_probs_become_a_column() -> None:
    worker, samples = make_worker()
    worker._teacher = score_ids
    check_teacher(
        worker,
        [
            (s.lease.group, row.index, row.num_tokens, len(s.prompt.token_ids))
            for s in samples[:5]
            for row in s.rows
        ],
    )


def test_a_teacher_scores_all_rows_of_episodes() -> None:
    worker, _ = make_worker()
    worker._teacher = score_ids
    worker._store = SampleStore()
    generator = random.Random(5)
    for group in (3, 4):
        prompt = Prompt(group, (1,), (), "unit", None)
        trees = [random_tree(generator, 8, with_experts=False) for _ in range(2)]
        worker._store.put(group, [sample_of(tree, prompt, i) for i, tree in enumerate(trees)])
    groups = {group: worker._store._find(group, 0).rows for group in (3, 4)}
    assert all(len(rows) > 2 for rows in groups.values())
    check_teacher(
        worker,
        [
            (group, number, len(row.columns[TOKEN_IDS]), int(np.argmax(row.columns[LOSS_MASK])))
            for group, rows in groups.items()
            for number, row in enumerate(rows)
        ],
    )


def test_the_runs_secrets_are_hidden_here_too() -> None:
    make_worker(secrets=("planted-in-the-recipe",))
    assert redaction.redact("it is planted-in-the-recipe") == "it is ***"
    redaction._known.discard("planted-in-the-recipe")
