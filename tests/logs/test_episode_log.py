"""Every episode that began has exactly one reason in episodes.jsonl, whatever ends the run."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.logs.episode_log import ABORTED, DROPPED_STALE, EpisodeLog
from mcore_rl.logs.rows import read_rows
from mcore_rl.types import Prompt
from tests.support.episode_rows import reasons_by_group
from tests.support.laid_out import refer_to
from tests.support.samples import make_sample


def prompt(index: int) -> Prompt:
    return Prompt(index, (1,), (), "unit", "")


def test_rows_say_what_began_and_how_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    log = EpisodeLog(path)
    first, second = log.begin(prompt(4), 2), log.begin(prompt(5), 1, greedy=True)
    log.step = 2
    log.end(first, ["done", "max_turns"])
    log.end_all(second, DROPPED_STALE, "too old")
    log.end_all(log.begin(prompt(6), 1), ABORTED, "z" * 10_000)
    log.close()
    begun = {"step": 1, "oldest_open": 0}
    *rows, _, long = read_rows(path)
    assert long["detail"] == "z" * 500 + "... (9500 more characters)"
    assert rows == [
        {**begun, "group": 0, "prompt_index": 4, "episodes": 2, "greedy": False},
        {**begun, "group": 1, "prompt_index": 5, "episodes": 1, "greedy": True},
        {"step": 2, "group": 0, "ends": ["done", "max_turns"]},
        {"step": 2, "group": 1, "ends": ["dropped_stale"], "detail": "too old"},
    ]


def test_a_block_ends_with_its_samples_or_is_aborted(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    log = EpisodeLog(path)
    with log.record([prompt(0), prompt(1)], 2, greedy=False) as samples:
        samples += refer_to([make_sample(i, "text") for i in range(4)])
    with (
        pytest.raises(KeyboardInterrupt),
        log.record([prompt(2)], 3, greedy=False) as samples,
    ):
        raise KeyboardInterrupt
    log.close()
    assert reasons_by_group(path) == {0: ["stop"] * 2, 1: ["stop"] * 2, 2: [ABORTED] * 3}


def test_what_is_open_at_the_end_is_aborted_and_later_calls_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    log = EpisodeLog(path)
    group = log.begin(prompt(0), 2)
    log.close()
    log.end(group, ["done", "done"])
    log.end_all(log.begin(prompt(1), 2), "done")
    assert reasons_by_group(path) == {0: [ABORTED] * 2}


def test_a_fresh_run_starts_the_file_over(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    for _ in range(2):
        log = EpisodeLog(path)
        log.begin(prompt(0), 1)
        log.close()
    assert reasons_by_group(path) == {0: [ABORTED]}


def test_an_end_has_a_reason_for_each_episode() -> None:
    log = EpisodeLog()
    group = log.begin(prompt(0), 2)
    with pytest.raises(AssertionError, match="group 0"):
        log.end(group, ["done"])


@given(
    launches=st.lists(
        st.lists(st.sampled_from(["begin", "end", "end last"]), max_size=8), min_size=1
    ),
    torn=st.integers(0, 20),
    rotate_bytes=st.sampled_from([0, 1, 150]),
)
def test_killed_launches_leave_one_reason_each(
    tmp_path_factory: pytest.TempPathFactory,
    launches: list[list[str]],
    torn: int,
    rotate_bytes: int,
) -> None:
    """A launch that is killed writes nothing more, and may tear its last row."""
    path = tmp_path_factory.mktemp("log") / "episodes.jsonl"
    EpisodeLog(path).begin(prompt(0), 1)
    for step, calls in enumerate(launches):
        with path.open("ab") as file:
            file.write(b'{"step": 1, "group": 0, "ends": ["done"]}'[:torn])
        log = EpisodeLog(path, step, rotate_bytes)
        open_groups: list[int] = []
        for call in calls:
            if call == "begin":
                open_groups.append(log.begin(prompt(step), 2))
            elif open_groups:
                at = 0 if call == "end" else -1
                log.end(open_groups.pop(at), ["done", "env_error"])
    EpisodeLog(path, last_step=len(launches)).close()
    rows = read_rows(path)
    begun = {row["group"]: row["episodes"] for row in rows if "episodes" in row}
    ended = Counter(row["group"] for row in rows if "ends" in row)
    assert ended == dict.fromkeys(begun, 1)
    assert {g: len(ends) for g, ends in reasons_by_group(path).items()} == begun
    assert sum("resumed_after" in row for row in rows) == len(launches) + 1


def test_a_resume_reads_back_to_the_oldest_open_group_alone(tmp_path: Path) -> None:
    """Rows before the first that is needed are no JSON here, so reading them would fail."""
    path = tmp_path / "episodes.jsonl"
    log = EpisodeLog(path)
    for _ in range(5):
        log.end_all(log.begin(prompt(0), 1), "done")
    path.write_text("nonsense\n" * 5)
    slow = log.begin(prompt(1), 2)
    for _ in range(3):
        log.end_all(log.begin(prompt(2), 1), "done")
    EpisodeLog(path, last_step=4).close()
    rows = [json.loads(line) for line in path.read_text().splitlines()[5:]]
    assert [row["ends"] for row in rows if row.get("group") == slow and "ends" in row] == [
        [ABORTED] * 2
    ]
    assert rows[-1] == {"step": 5, "resumed_after": 4}
