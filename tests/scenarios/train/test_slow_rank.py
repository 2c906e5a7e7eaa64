"""Ranks that train together over gloo: one that is slowed is named, and nobody else is."""

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.batches.rank_seconds import join_rank_steps
from mcore_rl.batches.summary import summarize_steps
from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.config.alarms import AlarmsConfig
from mcore_rl.device.rank_clock import read_thread_s
from mcore_rl.logs.alarms.conditions import AlarmEvent, list_of_training
from mcore_rl.types import LogprobOptions, RankStep
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

NUM_STEPS = 5
STEPS_BEFORE_ALARM = 3
SLOW_RANK = 2


class Brake:
    """Makes each pass of a rank last several times as long, on a busy machine as well.

    A fixed time would be little beside the work of ranks that share their cores.
    """

    def __init__(self) -> None:
        self._released_s = read_thread_s()

    def __call__(self, *_: object) -> None:
        """Compute for six times as long as the rank did since the last call."""
        began_s = read_thread_s()
        until_s = began_s + max(6 * (began_s - self._released_s), 0.15)
        while read_thread_s() < until_s:
            sum(range(10_000))
        self._released_s = read_thread_s()


def work(rank: int, world_size: int, port: int, model: ModelConfig, slow: int) -> list[RankStep]:
    actor = make_actor(rank, world_size, port, model, ParallelConfig(tp=2, dp=2))
    if rank == slow:
        actor.chunks[0].register_forward_pre_hook(Brake())
    steps = []
    for _ in range(NUM_STEPS):
        actor.compute_logprobs(my_batches(), LogprobOptions(temperature=1.0))
        stats = actor.train_step(my_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
        steps.append(RankStep(stats, actor.rank_clock.take(), 0))
    return steps


def train(folder: Path, slow: int) -> tuple[list[dict[str, float]], list[AlarmEvent]]:
    """Return the metrics of each step, and the alarms that they raise."""
    model = ModelConfig(path=str(write_hf_model(folder)))
    by_rank: list[list[RankStep]] = run_ranks(work, 4, model, slow)
    rows = [summarize_steps([join_rank_steps(steps)]) for steps in zip(*by_rank, strict=True)]
    alarms = list_of_training(AlarmsConfig(steps=STEPS_BEFORE_ALARM))
    events: list[Any] = [
        alarm.note(step, row) for step, row in enumerate(rows, 1) for alarm in alarms
    ]
    return rows, [event for event in events if event is not None]


@pytest.mark.gloo
def test_a_rank_that_is_slowed_is_named_after_some_steps(tmp_path: Path) -> None:
    rows, events = train(tmp_path / "model", SLOW_RANK)
    for row in rows[1:]:
        for phase in ("", "_in/train", "_in/forward"):
            assert row[f"ranks/slowest{phase}"] == SLOW_RANK
        assert row["ranks/lag"] > 2
    [event] = events
    assert event.alarm == "slow_rank" and event.step <= 1 + STEPS_BEFORE_ALARM
    assert f"trainer rank {SLOW_RANK}: all ranks wait for it" in event.text


@pytest.mark.slow
@pytest.mark.gloo
def test_ranks_that_are_equally_fast_raise_no_alarm(tmp_path: Path) -> None:
    rows, events = train(tmp_path / "model", slow=-1)
    assert len(rows) == NUM_STEPS and all(row["ranks/lag"] >= 1 for row in rows)
    assert not events
