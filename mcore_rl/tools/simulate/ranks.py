"""Stands for the ranks of trainer and critic: each call takes the seconds that it is predicted."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from mcore_rl.run.roles.trainer import PerCoordinate
from mcore_rl.tools.simulate.costs import Images, Lengths, TrainCosts
from mcore_rl.types import LogprobOptions, StepStats, StoredBatch, StoredColumn, TokenScores

Spend = Callable[[str, Callable[[], float]], None]
"""Lets the predicted seconds pass, in which ranks do what the name says."""


class SimulatedRanks:
    """Plays players.trainer.RankCalls, CriticCalls and players.colocation.Model."""

    def __init__(self, role: str, costs: TrainCosts, spend: Spend) -> None:
        self._role = role
        self._costs = costs
        self._spend = spend
        self._moved: set[str] = {"weights", "training"}
        self.busy_s = 0.0
        self.saved: dict[str, Any] = {}
        """State that the newest save keeps."""

    def compute_logprobs(
        self, per_dp: PerCoordinate, options: LogprobOptions
    ) -> list[list[TokenScores]]:
        self._work("log-probs", self._costs.forward_s, per_dp)
        name = "ref_logprobs" if options.reference else "old_logprobs"
        return [[TokenScores(StoredColumn(name))]]

    def compute_values(self, per_dp: PerCoordinate) -> list[list[Any]]:
        self._work("values", self._costs.forward_s, per_dp)
        return [[StoredColumn("values")]]

    def train_step(
        self, per_dp: PerCoordinate, *, num_tokens: int, temperature: float = 1.0
    ) -> StepStats:
        del temperature
        self._work("step", self._costs.step_s, per_dp)
        return StepStats(0.0, 0.0, 0.0, num_tokens)

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Take the seconds of a copy to host memory; what writes it works beside the steps."""
        del folder
        state = self._costs.state
        num_bytes = state.weights + state.optimizer
        self._spend(f"{self._role} save", lambda: self._costs.offload_s(num_bytes))
        self.saved = dict(extra)

    def finish_save(self) -> None:
        """Do nothing: the time of writing is not simulated."""

    def hold_seconds(self, parts: Collection[str]) -> float:
        """Return the seconds to move to or from the GPU what `parts` changes, and note it."""
        moved = self._moved ^ set(parts)
        self._moved = set(parts)
        state = self._costs.state
        sizes = {"weights": state.weights, "training": state.training}
        return sum(self._costs.offload_s(sizes[part]) for part in moved)

    def _work(
        self,
        name: str,
        predict: Callable[[Lengths, Images], float],
        per_dp: Sequence[StoredBatch],
    ) -> None:
        def seconds() -> float:
            most_tokens = max(sum(share.lens_N) for share in per_dp)
            seconds = predict(_lens(per_dp), _images(per_dp)) + self._costs.read_s(most_tokens)
            self.busy_s += seconds
            return seconds

        self._spend(f"{self._role} {name}", seconds)


def _lens(per_dp: Sequence[StoredBatch]) -> list[list[list[int]]]:
    """Return the lengths of sequences by coordinate and micro-batch; a filler has one token."""
    lens_by_coordinate = []
    for share in per_dp:
        rest = iter(share.lens_N)
        lens_by_coordinate.append([[next(rest) for _ in range(num)] or [1] for num in share.parts])
    return lens_by_coordinate


def _images(per_dp: Sequence[StoredBatch]) -> list[list[int]]:
    """Return the distinct images of each micro-batch if each prompt has one; a filler has none."""
    by_coordinate = []
    for share in per_dp:
        prompts = zip(share.store_N.tolist(), share.group_N.tolist(), strict=True)
        rest = iter(list(prompts))
        by_coordinate.append([len({next(rest) for _ in range(num)}) for num in share.parts])
    return by_coordinate
