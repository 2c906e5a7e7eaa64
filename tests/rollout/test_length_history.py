"""Prompts whose responses were long begin first."""

import pytest

from mcore_rl.rollout import collector_pool
from mcore_rl.rollout.collector_pool import LengthHistory
from mcore_rl.types import Prompt


def prompts(*indices: int, source: str = "unit") -> list[Prompt]:
    return [Prompt(i, (1,), (), source, "") for i in indices]


def test_unknown_prompts_keep_their_order_and_count_as_mean_ones() -> None:
    history = LengthHistory()
    ten = prompts(*range(10))
    assert history.sort_longest_first(ten) == list(range(10))
    history.note(ten[2], [10, 20])
    history.note(ten[7], [1000, 2000])
    history.note(ten[8], [500, 700])
    assert history.sort_longest_first(ten) == [7, 0, 1, 3, 4, 5, 6, 9, 8, 2]
    history.note(ten[7], [1, 1])
    assert history.sort_longest_first(ten)[0] == 8, "the last lengths count"
    assert history.sort_longest_first(prompts(7, 8, source="other")) == [0, 1]


def test_what_was_sampled_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_pool, "KEPT_PROMPTS", 2)
    history = LengthHistory()
    for prompt, length in zip(prompts(1, 2, 3), (900, 5, 10), strict=True):
        history.note(prompt, [length])
    assert history.sort_longest_first(prompts(1, 2, 3)) == [2, 0, 1], "1 is a mean one now"
