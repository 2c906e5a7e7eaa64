"""Prompts and samples that do not add up are refused; stored ones know their rows."""

from typing import Any

import pytest
import torch

from mcore_rl.types import GroupLease, RowFacts, VersionSpan, WeightVersion
from mcore_rl.types.samples import Prompt, Sample, StoredSample

PROMPT = Prompt(3, (1, 2), (), "unit", "7")


def span(start: int, stop: int, version: int = 0) -> VersionSpan:
    return VersionSpan(start, stop, WeightVersion(version))


def sample(**changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "prompt": PROMPT,
        "sample_index": 1,
        "response_ids": (5, 6, 7),
        "logprobs": (-0.1, -0.2, -0.3),
        "finish_reason": "stop",
        "versions": (span(0, 2), span(2, 3, 1)),
        "text": "",
    }
    return Sample(**fields | changes)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 4 of 'unit' has no tokens"):
        Prompt(4, (), (), "unit", "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": (-0.1,)}, "prompt 3 sample 1: 3 response tokens but 1 log-probs"),
        ({"versions": (span(0, 2),)}, "do not cover its 3 tokens once"),
        ({"versions": (span(0, 2), span(1, 3))}, "do not cover its 3 tokens once"),
        ({"routed_experts": torch.zeros(5, 1, 1)}, "routed experts of 5 tokens, expected 4"),
    ],
)
def test_a_sample_that_does_not_add_up_is_refused(changes: dict[str, Any], message: str) -> None:
    assert sample(routed_experts=torch.zeros(4, 1, 1))
    with pytest.raises(ValueError, match=message):
        sample(**changes)


def test_later_turns_have_the_experts_of_their_new_tokens() -> None:
    assert sample(routed_experts=torch.zeros(3, 1, 1), experts_start=1)
    with pytest.raises(ValueError, match="routed experts of 4 tokens, expected 3"):
        sample(routed_experts=torch.zeros(4, 1, 1), experts_start=1)


def test_a_response_is_one_row_and_an_episode_as_many_as_it_has() -> None:
    lease = GroupLease(0, 5)
    response = StoredSample(PROMPT, 2, 3, "stop", (span(0, 3),), True, lease)
    assert response.rows == (RowFacts(2, 5, 3),)
    assert StoredSample(PROMPT, 2, 0, "stop", (), True, lease).rows == ()
    rows = (RowFacts(4, 9, 2), RowFacts(5, 7, 1))
    assert StoredSample(PROMPT, 2, 3, "done", (span(0, 3),), True, lease, rows).rows == rows
