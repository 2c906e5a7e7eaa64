"""The stream of prompts: epochs, shares of sources, curricula, and exact continuation of each."""

import io
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.config import CurriculumConfig, StageConfig
from mcore_rl.data.streamed import windows
from mcore_rl.data.streamed.mixed import MixedPrompts
from mcore_rl.types import Prompt
from mcore_rl.types.scores import Scores
from tests.support.prompt_sets import (
    BY_DIFFICULTY,
    numbers_of,
    open_mixed,
    write_rows,
)

GROWING = CurriculumConfig(
    column="extra_info.difficulty",
    stages=[StageConfig(0, least=0, most=1), StageConfig(60, least=1, most=5)],
)
BY_PASS_RATE = CurriculumConfig(solved=0.5, unsolved=0.25)


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Iterator[None]:
    """Several windows in an epoch, and several blocks in a window."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "CHUNKS_PER_WINDOW", 8)
        patch.setattr(windows, "BLOCK_ROWS", 5)
        yield


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Three data sets of 50, 30 and 9 rows; the second has two overlong ones."""
    folder = tmp_path_factory.mktemp("sets")
    return [
        write_rows(folder / "a", [20, 30]),
        write_rows(folder / "b", [15, 15], "jsonl", long_rows=[2, 20]),
        write_rows(folder / "c", [9]),
    ]


def saved(stream: MixedPrompts) -> Any:
    """Return the state as a checkpoint gives it back."""
    buffer = io.BytesIO()
    torch.save(stream.state_dict(), buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def learn(stream: MixedPrompts, prompts: Sequence[Prompt]) -> None:
    """Report that the samples of every third prompt were right, of every fifth wrong."""
    for prompt in prompts:
        rewards = [float(prompt.index % 3 == 0), float(prompt.index % 5 != 0)]
        stream.note_scores([prompt], Scores(rewards))


OPTIONS: dict[str, dict[str, Any]] = {
    "one": {"weights": (1.0,)},
    "mixed": {"weights": (0.5, 0.3, 0.2)},
    "by difficulty": {"weights": (1.0,), "curriculum": GROWING, "rules": BY_DIFFICULTY},
    "by pass rate": {"weights": (3.0, 1.0), "curriculum": BY_PASS_RATE},
}
QUICK = ("mixed", "by difficulty")
"""Those of `make test`."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in OPTIONS],
)
@settings(max_examples=settings().max_examples // 4)
@given(takes=st.lists(st.integers(1, 40), min_size=2, max_size=6), data=st.data())
def test_a_stream_continues_exactly_wherever_it_was_saved(
    sets: list[list[str]], kind: str, takes: list[int], data: st.DataObject
) -> None:
    """Also in the middle of a window, and with more or less tokenized ahead."""
    options = OPTIONS[kind]
    mine = sets[: len(options["weights"])]
    whole = open_mixed(mine, **options)
    expected = []
    states = []
    for number in takes:
        states.append(saved(whole))
        expected.append(whole.take(number))
        learn(whole, expected[-1])
    cut = data.draw(st.integers(0, len(takes) - 1))
    resumed = open_mixed(mine, lookahead=data.draw(st.sampled_from([1, 7, 500])), **options)
    resumed.load_state_dict(states[cut])
    for number, prompts in zip(takes[cut:], expected[cut:], strict=True):
        assert resumed.take(number) == prompts
        learn(resumed, prompts)
    assert saved(resumed).keys() == saved(whole).keys()
    assert repr(saved(resumed)) == repr(saved(whole))
    whole.close()
    resumed.close()


def test_every_epoch_has_each_row_once_in_an_order_of_seed_and_epoch(
    sets: list[list[str]],
) -> None:
    epochs = []
    for seed in (0, 1):
        stream = open_mixed(sets[:1], seed=seed)
        epochs += [tuple(numbers_of(stream.take(50))) for _ in range(3)]
        stream.close()
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(epochs)) == 6


def test_sources_have_their_shares_and_epochs_of_their_own(sets: list[list[str]]) -> None:
    stream = open_mixed(sets, (0.5, 0.3, 0.2))
    prompts = stream.take(100)
    stream.close()
    of_source = [
        [p.index for p in prompts if low <= p.index < high]
        for low, high in ((0, 50), (50, 80), (80, 89))
    ]
    assert [len(indices) for indices in of_source] == [50, 30, 20]
    assert sorted(of_source[0]) == list(range(50))
    assert sorted(of_source[1][:28]) == sorted({*range(50, 80)} - {52, 70})
    assert sorted(of_source[2][:9]) == sorted(of_source[2][9:18]) == list(range(80, 89))


def test_overlong_prompts_are_dropped_counted_and_logged(
    sets: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    stream = open_mixed([sets[1]])
    with caplog.at_level(logging.INFO):
        assert sorted(numbers_of(stream.take(28))) == sorted({*range(30)} - {2, 20})
        stream.take(1)
    assert stream.state_dict()["sources"][0]["skipped"]["overlong"] >= 2
    assert "epoch 1, 0 of 30 rows; left out: 2 overlong" in caplog.text
    stream.close()


def test_prompts_that_were_begun_and_not_ended_are_begun_again(sets: list[list[str]]) -> None:
    whole = open_mixed(sets, (1.0, 1.0, 1.0)).take(12)
    stream = open_mixed(sets, (1.0, 1.0, 1.0))
    begun = [stream.begin() for _ in range(6)]
    stream.end([0, 3])
    resumed = open_mixed(sets, (1.0, 1.0, 1.0))
    resumed.load_state_dict(saved(stream))
    assert [resumed.begin(), resumed.begin()] == [begun[1], begun[2]]
    resumed.end([1])
    twice = open_mixed(sets, (1.0, 1.0, 1.0))
    twice.load_state_dict(saved(resumed))
    assert twice.take(9) == [whole[2], whole[4], whole[5], *whole[6:]]
    assert twice.state_dict()["open"] == []


def test_a_stream_tells_how_far_it_is_and_the_epoch_of_open_prompts(sets: list[list[str]]) -> None:
    """The third data set gives one of four prompts; it has nine rows."""
    stream = open_mixed(sets, (0.5, 0.25, 0.25))
    begun = [stream.begin()[0] for _ in range(80)]
    of_third = [epoch for source, epoch in map(stream.find_epoch, begun) if source == 2]
    assert of_third == [0] * 9 + [1] * 9 + [2] * 2
    stream.end(begun[:78])
    place = stream.get_place()
    assert (place.next, place.again, place.rows) == (80, (), (50, 30, 9))
    stream.load_state_dict(saved(stream))
    assert stream.get_place().again == (78, 79)


def test_a_prompt_that_is_overlong_since_the_save_is_not_begun_again(tmp_path: Path) -> None:
    files = write_rows(tmp_path, [20], long_rows=range(0, 20, 2))
    wide = type(BY_DIFFICULTY)(1000, "filter")
    stream = open_mixed([files], rules=wide)
    begun = [stream.begin()[1] for _ in range(10)]
    resumed = open_mixed([files])
    resumed.load_state_dict(saved(stream))
    short = [number for number in numbers_of(begun) if number % 2]
    assert 0 < len(short) < 10
    again = numbers_of(resumed.take(10))
    assert again[: len(short)] == short
    assert sorted(again) == list(range(1, 20, 2))


def test_other_weights_count_from_the_resume_on(
    sets: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    stream = open_mixed(sets[:2], (1.0, 1.0))
    before = stream.take(20)
    resumed = open_mixed(sets[:2], (0.9, 0.1))
    with caplog.at_level(logging.INFO):
        resumed.load_state_dict(saved(stream))
    assert "mixed by weights [0.9, 0.1] from now on, not [1.0, 1.0]" in caplog.text
    after = resumed.take(40)
    assert [sum(p.index < 50 for p in part) for part in (before, after)] == [10, 36]
    first_source = [p.index for p in [*before, *after] if p.index < 50]
    assert len(set(first_source)) == len(first_source)  # its epoch goes on


def test_difficulty_grows_with_the_prompts_drawn(sets: list[list[str]]) -> None:
    stream = open_mixed(sets[:1], curriculum=GROWING, rules=BY_DIFFICULTY)
    numbers = numbers_of(stream.take(90))
    assert all(n <= 10 for n in numbers[:2])
    for drawn, n in enumerate(numbers):
        way = min(drawn / 60, 1)
        assert 10 * way - 1e-6 <= n <= 10 + 40 * way + 1e-6, (drawn, n)
    assert max(numbers[60:]) > 40
    assert stream.state_dict()["sources"][0]["skipped"]["by difficulty"] > 0
    stream.close()


def test_solved_prompts_are_drawn_less_often(sets: list[list[str]]) -> None:
    stream = open_mixed(sets[:1], curriculum=CurriculumConfig(solved=0.1))
    first = stream.take(50)
    assert sorted(numbers_of(first)) == list(range(50))
    errors = ["" if p.index < 40 else "crashed" for p in first for _ in range(2)]
    rewards = [float(p.index % 2 == 0 or p.index >= 40) for p in first for _ in range(2)]
    stream.note_scores(first, Scores(rewards, errors=errors))
    later = numbers_of(stream.take(300))
    solved = sum(n % 2 == 0 and n < 40 for n in later)
    assert 0 < solved < 50  # 20 of 32 prompts in an epoch would be 188
    stream.close()


def test_samples_whose_rewards_failed_do_not_count_as_wrong(sets: list[list[str]]) -> None:
    """The other sample of each even prompt was right, and all of the odd ones failed."""
    stream = open_mixed(sets[:1], curriculum=CurriculumConfig(solved=0.1, unsolved=0.1))
    first = stream.take(50)
    rewards = [(1.0, math.nan) if n % 2 == 0 else (math.nan,) * 2 for n in numbers_of(first)]
    stream.note_scores(first, Scores([reward for pair in rewards for reward in pair]))
    later = numbers_of(stream.take(300))
    assert 0 < sum(n % 2 == 0 for n in later) < 75 and sum(n % 2 for n in later) > 225
    stream.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, r"has run.seed: 0, this run 1: resume with the same data files, run.seed"),
        ({"others": True}, r"has rows of set0: 50, this run 30"),
        ({"changed": True}, r"has hash of the files of set0: \w+, this run \w+: resume with"),
        ({"more": True}, r"has streamed data sets: 1, this run 2"),
    ],
)
def test_a_state_of_other_data_is_refused(
    sets: list[list[str]], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    state = saved(open_mixed(sets[:1]))
    mine = [sets[1]] if "others" in options else sets[:1]
    if "changed" in options:
        mine = [write_rows(tmp_path, [20, 30], long_rows=[7])]
    if "more" in options:
        mine = sets[:2]
    stream = open_mixed(mine, [1.0] * len(mine), seed=options.get("seed", 0))
    with pytest.raises(ValueError, match=message):
        stream.load_state_dict(state)


def test_the_state_of_prompts_that_were_loaded_whole_is_refused(sets: list[list[str]]) -> None:
    with pytest.raises(ValueError, match=r"streamed data sets: 0, this run 1: .*stream_above"):
        open_mixed(sets[:1]).load_state_dict({"position": 3, "num_items": 50, "seed": 0})


@pytest.mark.parametrize("kind", ["overlong", "unsuited"])
def test_a_source_without_a_usable_prompt_is_named(tmp_path: Path, kind: str) -> None:
    files = write_rows(tmp_path, [20], long_rows=range(20) if kind == "overlong" else [])
    easy = CurriculumConfig(column="extra_info.difficulty", stages=[StageConfig(most=-1)])
    stream = open_mixed(
        [files],
        curriculum=easy if kind == "unsuited" else None,
        rules=BY_DIFFICULTY,
    )
    with pytest.raises(
        ValueError,
        match=r"set0: none of its 20 rows can be drawn after 0 prompts .*left out: 20 .*widen",
    ):
        stream.take(1)


def test_the_first_prompts_stay_to_be_drawn(sets: list[list[str]]) -> None:
    stream = open_mixed(sets[:2], (1.0, 1.0))
    first = stream.first(5)
    assert len(first) == 5
    assert first == [p for p in stream.take(10) if p.index < 50]
    assert len(stream.first(1000)) == 50
