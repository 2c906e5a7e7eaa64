"""Rows whose arrays do not fit one another are refused; failed environments leave no outcome."""

from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.types import VersionSpan, WeightVersion
from mcore_rl.types.samples import EpisodeRecord, Row, has_outcome


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "token_ids": np.arange(4, dtype=np.int32),
        "is_trained": np.array([False, True, True, False]),
        "logprobs": np.zeros(4, np.float32),
        "turn_T": np.array([-1, 0, 0, -1], np.int16),
        "versions": (VersionSpan(1, 3, WeightVersion(0)),),
    }
    return Row(**fields | changes)


def test_a_row_adds_up() -> None:
    assert row(routed_experts=torch.zeros(3, 1, 1)).num_trained == 2
    for changes in (
        {"logprobs": np.zeros(3, np.float32)},
        {"versions": (VersionSpan(1, 2, WeightVersion(0)),)},
        {"routed_experts": torch.zeros(4, 1, 1)},
    ):
        with pytest.raises(AssertionError):
            row(**changes)


@pytest.mark.parametrize(("end", "has"), [("done", True), ("deadline", True), ("env_error", False)])
def test_an_environment_that_failed_tells_nothing_of_the_policy(end: str, has: bool) -> None:
    assert has_outcome(EpisodeRecord((), (), end, 0.0)) == has
