"""An engine checks drafts where it measures that tokens come faster with them."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from mcore_rl.rollout.draft_choice import TIMED_FOR, WITHOUT_MODEL, DraftChoice, Way, find_quick

FULL: Mapping[Way, float] = {Way.DRAFT: 1.5, Way.KEEP: 1.01, Way.PLAIN: 1.0}
"""Seconds of passes: drafts cost half a pass, and the draft model nearly nothing."""


@dataclass
class Engine:
    """Draws tokens by a clock of its own.

    seconds    of a pass of each way, for a number of requests
    accepted   drafts that a version of weights accepts in the mean, of three
    lag        passes that begin before the result of one is told
    prompts    share of passes that a prompt follows, which takes five times as long
    among      ways that it chooses between
    """

    seconds: Callable[[int], Mapping[Way, float]]
    accepted: dict[str, float]
    lag: int = 0
    prompts: float = 0.3
    among: Sequence[Way] = tuple(Way)
    now: float = 0.0
    tokens: float = 0.0
    ways: Counter[Way] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.choice = DraftChoice(lambda: self.now, dict, self.among)
        self._random = random.Random(0)
        self._untold: list[list[int]] = []

    def draw(self, num_passes: int, num_requests: int = 8, version: str = "0") -> None:
        for _ in range(num_passes):
            way = self.choice.choose(num_requests, version)
            share = self.accepted[version] / 3 if way is Way.DRAFT else 0.0
            drawn = [sum(self._random.random() < share for _ in range(3))] * num_requests
            self._untold.append(drawn)
            while len(self._untold) > self.lag:
                self.choice.note(self._untold.pop(0))
            self.now += self.seconds(num_requests)[way] * self._random.uniform(1.0, 1.01)
            if self._random.random() < self.prompts:
                self.now += 5.0
            self.ways[way] += 1
            self.tokens += num_requests + sum(drawn)

    def count(self, num_passes: int, num_requests: int = 8, version: str = "0") -> Counter[Way]:
        """Return the passes by their ways."""
        self.ways.clear()
        self.draw(num_passes, num_requests, version)
        return Counter(self.ways)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_stops_where_drafts_gain_nothing(lag: int) -> None:
    good = Engine(lambda _: FULL, {"0": 1.5}, lag)
    good.draw(100)
    assert good.count(1000) == {Way.DRAFT: 1000}
    assert good.choice.told.way is Way.DRAFT
    assert good.choice.told.gain == pytest.approx(2.5 / 1.5, rel=0.1)
    bad = Engine(lambda _: FULL, {"0": 0.1}, lag)
    bad.draw(100)
    assert bad.count(1000) == {Way.KEEP: 1000}
    assert bad.choice.told.gain == pytest.approx(1.1 / 1.5, rel=0.1)


def test_a_draft_model_that_costs_too_much_is_left_out() -> None:
    engine = Engine(lambda _: {**FULL, Way.KEEP: 1.3}, {"0": 0.1})
    engine.draw(100)
    assert engine.count(1000) == {Way.PLAIN: 1000}


def test_an_engine_without_a_draft_model_has_two_ways() -> None:
    """Each pass with drafts counts, whatever the pass before it was."""
    for accepted, way in ((1.5, Way.DRAFT), (0.1, Way.PLAIN)):
        engine = Engine(lambda _: FULL, {"0": accepted}, among=WITHOUT_MODEL)
        engine.draw(100)
        assert set(engine.ways) == set(WITHOUT_MODEL)
        assert engine.count(1000) == {way: 1000}
        assert engine.choice.told.gain == pytest.approx((1 + accepted) / 1.5, rel=0.1)


def test_a_pass_that_cannot_be_plain_checks_drafts() -> None:
    choice = DraftChoice(lambda: 0.0, dict, WITHOUT_MODEL)
    for _ in range(100):
        assert choice.choose(8, "0", only=Way.DRAFT) is Way.DRAFT
        choice.note([0] * 8)
    assert choice.told.gain is None


def test_a_draft_model_does_not_look_cheap_by_chance() -> None:
    """Other work slowed most of the plain passes down."""
    samples = {
        Way.DRAFT: [1.5] * 8,
        Way.PLAIN: [1.0, 1.0, *[2.0] * 6],
        Way.KEEP: [1.3, 1.3, 1.3, *[2.0] * 5],
    }
    quick = find_quick(samples)
    assert quick[Way.PLAIN] == 2.0 and quick[Way.KEEP] == pytest.approx(2.6)
    plain = {way: timed for way, timed in samples.items() if way in WITHOUT_MODEL}
    assert find_quick(plain) == {Way.DRAFT: 1.5, Way.PLAIN: 2.0}


def test_numbers_of_requests_are_measured_apart() -> None:
    """Drafts cost nothing beside few requests, and as much as further requests beside many."""
    engine = Engine(lambda n: {**FULL, Way.DRAFT: 1.1 if n < 16 else 3.0}, {"0": 0.6})
    engine.draw(100, num_requests=64)
    assert engine.count(500, num_requests=100) == {Way.KEEP: 500}
    engine.draw(100, num_requests=3)
    assert engine.count(500, num_requests=2) == {Way.DRAFT: 500}
    assert engine.count(500, num_requests=127) == {Way.KEEP: 500}


def test_new_weights_are_tried() -> None:
    """Few passes tell what new weights accept, as what a pass costs is known."""
    engine = Engine(lambda _: FULL, {"0": 0.1, "1": 2.0, "2": 0.0})
    engine.draw(100)
    assert engine.count(500, version="1") == {Way.DRAFT: 500}
    ways = engine.count(500, version="2")
    assert ways[Way.DRAFT] <= 4 and ways[Way.KEEP] == 500 - ways[Way.DRAFT]


def test_little_time_is_lost_by_measuring() -> None:
    engine = Engine(lambda _: FULL, {"0": 0.0}, prompts=0.0)
    engine.draw(TIMED_FOR // 2)
    begun_at, tokens = engine.now, engine.tokens
    engine.draw(3 * TIMED_FOR)
    assert engine.ways[Way.DRAFT] > 50, "the costs were measured again"
    others = engine.count(100)
    assert set(others) == {Way.KEEP}
    alone = Engine(lambda _: dict.fromkeys(Way, 1.0), {"0": 0.0}, prompts=0.0)
    alone.draw(3 * TIMED_FOR + 100)
    assert (engine.tokens - tokens) / (engine.now - begun_at) > 0.98 * alone.tokens / alone.now
