"""Supervised fine-tuning of a tiny policy: its loss falls, steps are logged and saved."""

from pathlib import Path

from mcore_rl.algo.policy_loss import sft_loss
from mcore_rl.config import CheckpointConfig, SftConfig
from mcore_rl.data.sft import make_sft_batch
from mcore_rl.loops.sft import fine_tune
from mcore_rl.types import TrainBatch
from tests.support.table_policy import MemoryLog, TablePolicy


class Answers:
    """Token n is followed by n + 1; batches count what was handed out."""

    def __init__(self) -> None:
        self.position = 0

    def next_batch(self, num_sequences: int) -> TrainBatch:
        starts = range(self.position, self.position + num_sequences)
        self.position += num_sequences
        return make_sft_batch([((n % 3, n % 3 + 1, n % 3 + 2), 1) for n in starts])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}


def test_a_policy_learns_to_answer() -> None:
    policy, log = TablePolicy(sft_loss), MemoryLog()
    checkpoint = CheckpointConfig(every_steps=4)
    fine_tune(SftConfig(steps=10, batch_size=6), checkpoint, Answers(), policy, log)
    losses = log.values("loss/nll")
    assert list(losses) == list(range(1, 11))
    assert losses[1] > 1.6 and losses[10] < 0.5 * losses[1]
    assert list(log.values("time/checkpoint")) == [4, 8, 10], "what training paused for saves"
    assert {step: state["prompts"] for step, state in policy.saved.items()} == {
        4: {"position": 24},
        8: {"position": 48},
        10: {"position": 60},
    }
    assert all(value > 0 for value in log.values("train/tokens_per_second").values())


def test_a_resumed_run_takes_the_steps_that_are_left(tmp_path: Path) -> None:
    policy, log = TablePolicy(sft_loss), MemoryLog()
    fine_tune(SftConfig(steps=5, batch_size=2), CheckpointConfig(), Answers(), policy, log, 3)
    assert list(log.values("loss/nll")) == [4, 5] and list(policy.saved) == [5]
