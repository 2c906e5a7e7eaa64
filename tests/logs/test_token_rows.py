"""Tokens are written with texts, log-probs, weight versions and turns, up to a bound."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.logs.rows import read_rows
from mcore_rl.logs.token_rows import MOST_TOKENS, TokenTexts, make_token_rows
from mcore_rl.types import EpisodeRecord, Row, Sample, VersionSpan, WeightVersion
from mcore_rl.types.scores import Scores
from tests.support.samples import HeldSampleLog, make_sample


class Decoder:
    """Stands in for a tokenizer: the text of token 7 is <7>. It counts what it decodes."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def batch_decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        self.num_decoded += len(sequences)
        return [f"<{token}>" for [token] in sequences]


def make_long(num_tokens: int) -> Sample:
    half = num_tokens // 2
    versions = (
        VersionSpan(0, half, WeightVersion(3)),
        VersionSpan(half, num_tokens, WeightVersion(4)),
    )
    return replace(
        make_sample(0, ""),
        response_ids=tuple(range(10, 10 + num_tokens)),
        logprobs=(-0.123456,) * num_tokens,
        versions=versions,
    )


def test_a_response_follows_its_prompt() -> None:
    assert make_token_rows(make_long(3), TokenTexts(Decoder())) == [
        {
            "texts": ["<1>", "<2>", "<10>", "<11>", "<12>"],
            "trained": [[2, 5, 0]],
            "logprobs": [-0.1235] * 3,
            "versions": [[2, 3, 3], [3, 5, 4]],
        }
    ]


def test_a_long_response_is_cut_with_all_that_belongs_to_it() -> None:
    [row] = make_token_rows(make_long(2 * MOST_TOKENS), TokenTexts(Decoder()))
    assert row["cut"] == MOST_TOKENS + 2
    assert len(row["texts"]) == MOST_TOKENS
    assert row["trained"] == [[2, MOST_TOKENS, 0]]
    assert len(row["logprobs"]) == MOST_TOKENS - 2
    assert row["versions"] == [[2, MOST_TOKENS, 3]], "the second version comes after the cut"


def test_an_episode_has_its_rows_with_their_turns() -> None:
    row = Row(
        token_ids=np.array([1, 2, 3, 4, 5], np.int32),
        is_trained=np.array([False, True, True, False, True]),
        logprobs=np.array([0, -1, -2, 0, -3], np.float32),
        turn_T=np.array([-1, 0, 0, -1, 1], np.int16),
        versions=(VersionSpan(1, 3, WeightVersion(0)), VersionSpan(4, 5, WeightVersion(1))),
    )
    episode = EpisodeRecord((row,), (), "done", 1.0)
    [shown] = make_token_rows(replace(make_sample(0, ""), episode=episode), TokenTexts(Decoder()))
    assert shown["trained"] == [[1, 3, 0], [4, 5, 1]]
    assert shown["logprobs"] == [-1.0, -2.0, -3.0]
    assert shown["versions"] == [[1, 3, 0], [4, 5, 1]]


def test_the_first_samples_of_a_step_have_tokens_each_decoded_once(tmp_path: Path) -> None:
    decoder = Decoder()
    options: dict[str, Any] = {"to_texts": TokenTexts(decoder), "token_samples": 2}
    with HeldSampleLog(tmp_path, console=False, **options) as log:
        for step in (1, 2):
            log.log_held(step, [make_sample(i, "") for i in range(3)], Scores([0.0] * 3))
    rows = read_rows(tmp_path / "samples.jsonl")
    assert ["token_rows" in row for row in rows] == [True, True, False] * 2
    assert rows[0]["token_rows"][0]["texts"] == ["<1>", "<2>", "<5>"]
    assert decoder.num_decoded == 3
