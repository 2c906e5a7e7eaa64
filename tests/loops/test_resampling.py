"""Groups whose collector is lost before they have scores are drawn again, in their places."""

from collections.abc import Sequence

import pytest

from mcore_rl.loops.resampling import sample_and_score
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.types import GroupLease, Prompt, StoredSample
from mcore_rl.types.scores import Scores

PROMPTS = [Prompt(i, (1,), (), "unit", "") for i in range(4)]


class Engines:
    """Groups go to two stores in turn; store 1 is lost as often as `num_losses` says."""

    def __init__(self, num_losses: int) -> None:
        self.num_losses = num_losses
        self.calls: list[tuple[list[int], int, bool, bool]] = []
        self.num_lost = 0
        self.next_group = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        *,
        greedy: bool,
        seed: int,
        for_eval: bool = False,
    ) -> list[StoredSample]:
        self.calls.append(([prompt.index for prompt in prompts], seed, greedy, for_eval))
        samples: list[StoredSample] = []
        for prompt in prompts:
            lease = GroupLease(self.next_group % 2, self.next_group)
            self.next_group += 1
            samples += [
                StoredSample(prompt, i, 1, "stop", (), False, lease) for i in range(num_samples)
            ]
        return samples

    def reward(self, samples: Sequence[StoredSample]) -> Scores:
        if self.num_losses and any(sample.lease.store == 1 for sample in samples):
            self.num_losses -= 1
            raise SamplesLostError("collector 1 died", [1])
        return Scores([sample.prompt.index + sample.sample_index / 10 for sample in samples])

    def measure_engines(self) -> dict[str, float]:
        return {}

    def note_lost(self, num_samples: int) -> None:
        self.num_lost += num_samples

    def take_num_lost(self) -> int:
        return self.num_lost


@pytest.mark.parametrize(
    ("num_losses", "drawn", "num_lost"),
    [(0, [[0, 1, 2, 3]], 0), (1, [[0, 1, 2, 3], [1, 3]], 4), (2, [[0, 1, 2, 3], [1, 3], [3]], 6)],
)
def test_lost_groups_are_drawn_again(
    num_losses: int, drawn: list[list[int]], num_lost: int
) -> None:
    engines = Engines(num_losses)
    rollout = sample_and_score(
        engines, engines.reward, PROMPTS, 2, greedy=False, seed=5, for_eval=True
    )
    assert [indices for indices, *_ in engines.calls] == drawn
    assert {tuple(how) for _, *how in engines.calls} == {(5, False, True)}
    places = [(sample.prompt.index, sample.sample_index) for sample in rollout.samples]
    assert places == [(i, k) for i in range(4) for k in range(2)]
    assert rollout.scores.rewards_N == [0.0, 0.1, 1.0, 1.1, 2.0, 2.1, 3.0, 3.1]
    assert engines.num_lost == num_lost
    assert len({sample.lease.group for sample in rollout.samples}) == 4
