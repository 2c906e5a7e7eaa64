"""How many rewards may fail, and what a run says that ends because of them."""

from math import nan
from typing import Any

import pytest

from mcore_rl.config import RewardConfig
from mcore_rl.loops.outcomes import RewardFailureError, RewardFailures
from mcore_rl.types.scores import Scores


def failures_of(num_samples: int, num_failed: int, num_lost: int = 0) -> RewardFailures:
    """Failures in the second of two calls, numbered from 1; the first `num_lost` are lost."""
    failures = RewardFailures()
    num_first = num_samples - num_failed
    failures.note(Scores([1.0] * num_first, errors=[""] * num_first))
    errors = [f"late {i + 1}" for i in range(num_failed)]
    is_lost = [i < num_lost for i in range(num_failed)]
    failures.note(Scores([nan] * num_failed, errors=errors, is_lost_N=is_lost))
    return failures


@pytest.mark.parametrize(
    ("num_failed", "options", "ends"),
    [
        (0, {}, False),
        (8, {}, False),  # a quarter
        (9, {}, True),
        (9, {"max_failed_share": 0.3}, False),
        (7, {"max_failed_share": 0}, False),  # too few to tell a share
        (8, {"max_failed_share": 0}, True),
        (32, {"max_failed_share": 1}, False),
        (9, {"on_error": "value", "error_value": -1.0}, True),
        (0, {"on_error": "stop"}, False),
        (1, {"on_error": "stop"}, True),
    ],
)
def test_more_failures_than_the_recipe_bears_end_the_run(
    num_failed: int, options: dict[str, Any], ends: bool
) -> None:
    failures = failures_of(32, num_failed)
    share = num_failed / 32
    assert failures.metrics() == {"reward/errors": num_failed, "reward/failed_share": share}
    config = RewardConfig(**options)
    if not ends:
        failures.check(config, "step 3")
        return
    with pytest.raises(RewardFailureError, match=f"^step 3: .*{num_failed} of 32 rewards failed"):
        failures.check(config, "step 3")


def test_a_worker_lost_with_its_episodes_ends_no_small_run() -> None:
    for on_error in ("leave_out", "stop"):
        failures_of(6, 2, num_lost=2).check(RewardConfig(on_error=on_error), "step 1")
    with pytest.raises(RewardFailureError, match=r"on_error=stop, and 1 of 6 .* with 'late 3'"):
        failures_of(6, 3, num_lost=2).check(RewardConfig(on_error="stop"), "step 1")
    for on_error in ("leave_out", "stop"):
        with pytest.raises(RewardFailureError, match=r"^step 1: 9 of 20 .* a share of 0.45 above"):
            failures_of(20, 9, num_lost=9).check(RewardConfig(on_error=on_error), "step 1")


def test_a_small_step_ends_the_run_if_all_of_it_failed() -> None:
    failures_of(4, 3).check(RewardConfig(), "step 1")
    with pytest.raises(RewardFailureError, match=r"^step 1: 4 of 4 rewards failed, a share of 1 "):
        failures_of(4, 4).check(RewardConfig(), "step 1")


def test_the_message_names_share_bound_first_error_and_remedies() -> None:
    with pytest.raises(RewardFailureError) as caught:
        failures_of(16, 10).check(RewardConfig(), "evaluation")
    assert str(caught.value) == (
        "evaluation: 10 of 16 rewards failed, a share of 0.625 above reward.max_failed_share=0.25;"
        " the first: 'late 1'. Mend what failed and give the same command again: it goes on after"
        " the last checkpoint. Or raise reward.max_failed_share"
    )
    with pytest.raises(RewardFailureError) as caught:
        failures_of(8, 1).check(RewardConfig(on_error="stop"), "step 1")
    assert str(caught.value) == (
        "step 1: reward.on_error=stop, and 1 of 8 rewards failed, at first with 'late 1'; mend what"
        " failed and give the same command again: it goes on after the last checkpoint. Or set"
        " reward.on_error=leave_out, which trains without such samples"
    )


def test_without_samples_nothing_has_failed() -> None:
    assert RewardFailures().share == 0
    RewardFailures().check(RewardConfig(max_failed_share=0), "step 1")
