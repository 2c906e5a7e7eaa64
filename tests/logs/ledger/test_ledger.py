"""Records of single events: why a step leaves samples out, episodes of several rows, warnings."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.batches.stored_batch import make_stored_batch, without_lost, without_truncated
from mcore_rl.logs.ledger.balance import format_balance, read_balance
from mcore_rl.logs.ledger.file import NAME, read_records
from mcore_rl.logs.ledger.ledger import LaunchEntry, RunLedger
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.types import (
    GroupLease,
    Prompt,
    RowFacts,
    StoredSample,
    VersionSpan,
    WeightVersion,
)
from mcore_rl.types.scores import Scores

GROUP = 3


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[RunLedger]:
    with RunLedger(tmp_path / NAME) as ledger:
        ledger.begin(LaunchEntry(0, 0, (), (9,), 0, "sync", 0, GROUP))
        yield ledger


def draw(
    ledger: RunLedger, ends: Sequence[Sequence[str]], rows: Sequence[int] = (1, 1, 1)
) -> list[StoredSample]:
    """Return the samples of prompts 0, 1, ...; each sample has so many rows. "empty": no token."""
    ledger.note_drawn(0, range(len(ends)))
    samples = []
    for number, group in enumerate(ends):
        lease = GroupLease(store=number, group=10 + number)
        prompt = Prompt(number, (1, 2), (), "unit", "", position=number)
        row = 0
        for i, end in enumerate(group):
            num_tokens = 0 if end == "empty" else 4
            episode = (
                tuple(RowFacts(row + n, 6, 4) for n in range(rows[i])) if max(rows) > 1 else ()
            )
            row += rows[i]
            versions = (VersionSpan(0, num_tokens, WeightVersion(0)),) if num_tokens else ()
            samples.append(
                StoredSample(prompt, i, num_tokens, end, versions, False, lease, episode)
            )
    return samples


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [dict(record) for record in read_records(folder / NAME) if record["is"] == kind]


def test_a_step_says_why_it_leaves_samples_out(ledger: RunLedger, tmp_path: Path) -> None:
    """The last sample of prompt 1 has no reward; prompt 2 is lost before its batch is made, and
    prompt 3 in the optimizer step.
    """
    ends = [["stop", "length", "empty"], ["env_error", "stop", "stop"], ["stop"] * 3, ["stop"] * 3]
    samples = draw(ledger, ends)
    scores = Scores([0.0, 1.0, 0.0, nan, 1.0, nan, *[0.5] * 6])
    ledger.note_sampled(samples)
    ledger.note_scored(samples, scores)
    kept = [samples[i] for i in (0, 1, 2, 4, 9, 10, 11)]
    batch = without_truncated(make_stored_batch(kept), kept)
    lost = SamplesLostError("store 3 died", [3])
    ledger.begin_training()
    ledger.note_lost_stores(lost.stores)
    left = without_lost(batch, lost)
    assert left is not None
    ledger.note_batch(left)
    ledger.end_training(1)
    ledger.note_step(1, samples, scores, kept)
    [step], [trained] = read(tmp_path, "step"), read(tmp_path, "trained")
    assert step["groups"] == [10, 11, 12, 13]
    assert trained["groups"] == [[10, 0], [11, 1]]
    assert step["left_out"] == {
        "overlong": [[10, 1]],
        "empty": [[10, 2]],
        "env_error": [[11, 0]],
        "no_reward": [[11, 2]],
        "lost": [12, 13],
    }
    assert read_balance(tmp_path).holds
    assert [record["rewards"] for record in read(tmp_path, "scored")][:2] == [
        *([0, 1, 0], [None, 1, None]),
    ]


def test_episodes_are_counted_by_their_rows(ledger: RunLedger, tmp_path: Path) -> None:
    """Sample 0 has row 0, sample 1 rows 1 and 2, sample 2 rows 3 to 5. A recovery trains the last
    two samples once more.
    """
    samples = draw(ledger, [["stop"] * 3], rows=(1, 2, 3))
    scores = Scores([0.0, 1.0, 0.0])
    ledger.note_sampled(samples)
    ledger.note_scored(samples, scores)
    ledger.begin_training()
    ledger.note_batch(make_stored_batch(samples))
    ledger.end_training(1)
    ledger.note_step(1, samples, scores, samples)
    assert read(tmp_path, "trained")[0]["groups"] == [10] == read(tmp_path, "step")[0]["groups"]
    assert read_balance(tmp_path).samples == {"trained": 3}
    ledger.begin_training()
    ledger.note_batch(make_stored_batch(samples[1:]))
    ledger.end_training(1)
    ledger.note("sync", version=1)
    ledger.note_save(1)
    again = read(tmp_path, "trained")[1]
    assert again["groups"] == [[10, 1, 2]] and read_balance(tmp_path).holds


def test_a_critic_counts_while_the_policy_does_not_train(ledger: RunLedger, tmp_path: Path) -> None:
    samples = draw(ledger, [["stop"] * 3])
    scores = Scores([0.0, 1.0, 0.0])
    ledger.note_sampled(samples)
    ledger.note_scored(samples, scores)
    ledger.begin_training()
    ledger.note_batch(make_stored_batch(samples), is_critic=True)
    ledger.end_training(1)
    ledger.note_step(1, samples, scores, samples)
    assert read(tmp_path, "trained")[0]["by"] == "critic"
    assert read_balance(tmp_path).holds


def test_warnings_are_kept_some_of_each_step(ledger: RunLedger, tmp_path: Path) -> None:
    log = logging.getLogger("mcore_rl.rollout")
    for number in range(30):
        log.warning("engine %d is lost", number)
    log.info("engine 1 serves again")
    ledger.note_step(1, [], Scores([]), [])
    texts = [record["text"] for record in read(tmp_path, "warning")]
    assert texts == [f"engine {number} is lost" for number in range(20)]
    assert read(tmp_path, "step")[0]["warnings_held"] == 10


def test_samples_name_the_engines_that_drew_them(ledger: RunLedger, tmp_path: Path) -> None:
    """The second sample of prompt 0 moved from engine 2 to engine 0; nobody knows who drew prompt
    2.
    """
    drawn = draw(ledger, [["stop"] * 3] * 3)
    engines = [(2,), (2, 0), (2, 2), (1,), (1,), (1,), (), (), ()]
    ledger.note_sampled(
        [replace(s, engines=of_sample) for s, of_sample in zip(drawn, engines, strict=True)]
    )
    ledger.note_save(0)
    first, second, third = read(tmp_path, "sampled")
    assert first["engines"] == [2, [2, 0], 2] and second["engines"] == 1
    assert "engines" not in third
    balance = read_balance(tmp_path)
    assert balance.by_engine == {0: 1, 1: 3, 2: 3}
    assert "drawn by: engine 0 1, engine 1 3, engine 2 3" in format_balance(balance)


def test_evaluations_have_no_records(ledger: RunLedger, tmp_path: Path) -> None:
    prompt = Prompt(0, (1,), (), "unit", "")
    sample = StoredSample(prompt, 0, 1, "stop", (), False, GroupLease(0, 5))
    ledger.note_sampled([sample])
    ledger.note_scored([sample], Scores([1.0]))
    ledger.note_save(1)
    assert [record["is"] for record in read_records(tmp_path / NAME)] == ["launch", "save"]
