"""Values of the loop: what they refuse, and how scores are selected and joined."""

from typing import Any

import pytest
import torch

from mcore_rl.types import Prompt, Sample, TrainBatch, VersionSpan, WeightVersion

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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("advantages_T", torch.zeros(2)),
        ("advantages_T", torch.zeros(3, 1)),
        ("routed_experts_TLK", torch.zeros(3, 1)),
    ],
)
def test_a_field_of_the_wrong_shape_is_refused(name: str, value: Any) -> None:
    tokens: dict[str, Any] = {
        "token_ids_T": torch.zeros(3, dtype=torch.int64),
        "loss_mask_T": torch.ones(3, dtype=torch.bool),
        "lens_N": (1, 2),
    }
    assert set(TrainBatch(**tokens).token_fields()) == {"token_ids_T", "loss_mask_T"}
    with pytest.raises(ValueError, match=rf"TrainBatch.{name} has .*, lens_N sum to 3"):
        TrainBatch(**tokens, **{name: value})
