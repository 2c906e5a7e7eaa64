"""Bounds of the difficulty that move by prompts drawn; prompts thinned by their last samples."""

from collections.abc import Sequence

import pytest
import torch

from mcore_rl.config import CurriculumConfig, StageConfig
from mcore_rl.data import curriculum as module
from mcore_rl.data.curriculum import (
    ALL_RIGHT,
    ALL_WRONG,
    MIXED,
    Bounds,
    Curriculum,
    PassRates,
    bounds_after,
    uniform,
)

STAGES = [
    StageConfig(after=0, least=0.0, most=0.2),
    StageConfig(after=100, least=0.0, most=0.6),
    StageConfig(after=300, least=0.4, most=1.0),
]
ONE_CUT = [StageConfig(after=0, most=0.5)]


@pytest.mark.parametrize(
    ("num_drawn", "least", "most"),
    [
        (0, 0.0, 0.2),
        (50, 0.0, 0.4),
        (100, 0.0, 0.6),
        (200, 0.2, 0.8),
        (300, 0.4, 1.0),
        (10**9, 0.4, 1.0),
    ],
)
def test_bounds_move_in_a_straight_line_between_stages(
    num_drawn: int, least: float, most: float
) -> None:
    bounds = bounds_after(STAGES, num_drawn)
    assert (bounds.least, bounds.most) == (pytest.approx(least), pytest.approx(most))
    assert bounds.allow(bounds.least) and bounds.allow(bounds.most)
    assert not bounds.allow(least - 0.01) and not bounds.allow(most + 0.01)


def test_a_bound_that_is_not_given_bounds_nothing() -> None:
    assert bounds_after([], 5) == Bounds()
    assert bounds_after(ONE_CUT, 5).allow(-1e9)
    assert not bounds_after(ONE_CUT, 5).allow(0.6)


@pytest.mark.parametrize(
    ("are_right", "expected"),
    [
        ([True, True], ALL_RIGHT),
        ([False, False], ALL_WRONG),
        ([False] * 15 + [True], MIXED),
        ([True] * 15 + [False], MIXED),
    ],
)
def test_a_prompt_keeps_what_its_last_samples_were(are_right: list[bool], expected: int) -> None:
    rates = PassRates(4)
    rates.note(7, [not right for right in are_right])
    rates.note(7, are_right)
    assert rates.get(7) == expected
    assert rates.get(3) is None  # of the same place
    rates.note(3, [True])
    assert rates.get(7) is None


def test_what_was_learned_is_saved_and_fits_a_table_of_another_size() -> None:
    rates = PassRates(10)
    for prompt in (1, 5, 12):
        rates.note(prompt, [prompt > 4])
    for num_places in (10, 50):
        other = PassRates(num_places)
        other.note(3, [True])
        other.load_state_dict(rates.state_dict())
        assert [other.get(prompt) for prompt in (1, 3, 5, 12)] == [
            ALL_WRONG,
            None,
            ALL_RIGHT,
            ALL_RIGHT,
        ]
    assert rates.state_dict()["prompts"].tolist() == [1, 12, 5]
    assert all(isinstance(value, torch.Tensor) for value in rates.state_dict().values())


def test_solved_prompts_are_drawn_in_a_share_of_later_epochs() -> None:
    curriculum = Curriculum(CurriculumConfig(solved=0.25, unsolved=0.5), seed=0, num_prompts=3)
    assert all(curriculum.draws(prompt, epoch) for prompt in range(3) for epoch in range(50))
    curriculum.note(0, [True, True])
    curriculum.note(1, [False, False])
    curriculum.note(2, [False, True])
    shares = [sum(curriculum.draws(prompt, epoch) for epoch in range(4000)) for prompt in range(3)]
    assert shares[2] == 4000
    assert shares[0] == pytest.approx(1000, abs=150)
    assert shares[1] == pytest.approx(2000, abs=150)
    curriculum.note(0, [])  # the reward of every sample failed
    assert not all(curriculum.draws(0, epoch) for epoch in range(50))


def test_a_curriculum_resumes_with_what_it_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_ROWS", 5)
    config = CurriculumConfig(solved=0.5)
    first = Curriculum(config, 0, 100)
    for prompt in range(20):
        first.note(prompt, [True])
    second = Curriculum(config, 0, 100)
    second.load_state_dict(first.state_dict())
    assert drawn(second) == drawn(first)
    assert len(first.state_dict()["prompts"]) == 5
    fresh = Curriculum(config, 0, 100)
    fresh.load_state_dict(Curriculum(CurriculumConfig(), 0, 100).state_dict())
    assert drawn(fresh) != drawn(first)


def drawn(curriculum: Curriculum) -> Sequence[bool]:
    return [curriculum.draws(prompt, epoch) for prompt in range(20) for epoch in range(20)]


def test_difficulties_outside_the_stages_do_not_suit() -> None:
    curriculum = Curriculum(CurriculumConfig(column="d", stages=STAGES), 0, 10)
    assert [curriculum.suits(0.5, num_drawn) for num_drawn in (0, 100, 300)] == [False, True, True]
    assert Curriculum(CurriculumConfig(), 0, 10).suits(float("nan"), 0)


def test_a_number_of_a_key_is_the_same_in_every_version() -> None:
    """Checkpoints of earlier versions depend on it."""
    assert uniform(0, 1, 2, 3) == 0.6014845214281603
