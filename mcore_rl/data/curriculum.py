"""Decides by difficulty and by measured pass rate whether a prompt is drawn when its turn comes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mcore_rl.config import CurriculumConfig, StageConfig
from mcore_rl.types import Array

TABLE_ROWS = 1_000_000
"""Prompts whose last samples are remembered, in 9 bytes each."""
_EMPTY = -1
_DRAWS = 1
"""Tells these numbers from others that are drawn from the same seed."""
ALL_WRONG = 0
MIXED = 1
ALL_RIGHT = 2


@dataclass(frozen=True)
class Bounds:
    """Difficulties that are drawn; both bounds belong to them."""

    least: float = -np.inf
    most: float = np.inf

    def allow(self, difficulty: float) -> bool:
        return self.least <= difficulty <= self.most


def bounds_after(stages: Sequence[StageConfig], num_drawn: int) -> Bounds:
    """Return the difficulties to draw from once `num_drawn` prompts were drawn.

    The bounds are those of a stage when it is reached, and move in a straight line to the next.
    """
    if not stages:
        return Bounds()
    number = sum(stage.after <= num_drawn for stage in stages)
    return _bounds_between(stages[number - 1], stages[min(number, len(stages) - 1)], num_drawn)


def _bounds_between(here: StageConfig, there: StageConfig, num_drawn: int) -> Bounds:
    """Return the bounds on the line from stage `here`, which was reached, to stage `there`."""
    way = (num_drawn - here.after) / (there.after - here.after) if there is not here else 0.0

    def between(start: float | None, end: float | None, unbounded: float) -> float:
        return unbounded if start is None or end is None else start + (end - start) * way

    return Bounds(between(here.least, there.least, -np.inf), between(here.most, there.most, np.inf))


class PassRates:
    """Whether the samples of prompts were right when they were last drawn, in bounded memory.

    A prompt has one place, its number modulo the number of places. In data sets with more prompts
    than places, a newer prompt replaces the one that had its place.
    """

    def __init__(self, num_places: int) -> None:
        self._prompt_S: Array = np.full(num_places, _EMPTY, np.int64)
        self._outcome_S: Array = np.zeros(num_places, np.uint8)

    def note(self, prompt: int, are_right: Sequence[bool]) -> None:
        """Remember the samples of a prompt."""
        place = prompt % len(self._prompt_S)
        self._prompt_S[place] = prompt
        self._outcome_S[place] = (
            ALL_RIGHT if all(are_right) else MIXED if any(are_right) else ALL_WRONG
        )

    def get(self, prompt: int) -> int | None:
        """Return ALL_WRONG, MIXED or ALL_RIGHT; None if it is not known."""
        place = prompt % len(self._prompt_S)
        return int(self._outcome_S[place]) if self._prompt_S[place] == prompt else None

    def state_dict(self) -> dict[str, Any]:
        """Return what is known, as tensors without empty places."""
        known = np.flatnonzero(self._prompt_S != _EMPTY)
        return {
            "prompts": torch.from_numpy(self._prompt_S[known]),
            "outcomes": torch.from_numpy(self._outcome_S[known]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a table, which may have had another number of places."""
        self._prompt_S.fill(_EMPTY)
        prompts = state["prompts"].numpy()
        places = prompts % len(self._prompt_S)
        self._prompt_S[places] = prompts
        self._outcome_S[places] = state["outcomes"].numpy()


class Curriculum:
    """The rules of a recipe with what they have learned."""

    def __init__(self, config: CurriculumConfig, seed: int, num_prompts: int) -> None:
        self._stages = config.stages
        self._shares: dict[int | None, float] = {
            ALL_WRONG: config.unsolved,
            ALL_RIGHT: config.solved,
        }
        self._seed = seed
        self._rates = PassRates(min(TABLE_ROWS, num_prompts)) if config.by_pass_rate else None

    @property
    def learns(self) -> bool:
        """Whether `note` changes anything."""
        return self._rates is not None

    def suits(self, difficulty: float, num_drawn: int) -> bool:
        """Return whether the difficulty is drawn once `num_drawn` prompts were drawn."""
        return not self._stages or bounds_after(self._stages, num_drawn).allow(difficulty)

    def draws(self, prompt: int, epoch: int) -> bool:
        """Return whether the prompt is drawn in this epoch, given its last samples."""
        if self._rates is None:
            return True
        share = self._shares.get(self._rates.get(prompt), 1.0)
        return share >= 1 or uniform(self._seed, prompt, epoch, _DRAWS) < share

    def note(self, prompt: int, are_right: Sequence[bool]) -> None:
        """Remember whether the samples of a prompt were right."""
        if self._rates is not None and are_right:
            self._rates.note(prompt, are_right)

    def state_dict(self) -> dict[str, Any]:
        return self._rates.state_dict() if self._rates is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what was learned; a run without pass rates before begins to learn."""
        if self._rates is not None and state:
            self._rates.load_state_dict(state)


def uniform(*key: int) -> float:
    """Return a number in [0, 1) drawn from the key alone."""
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw()
    return bits / 2.0**64
