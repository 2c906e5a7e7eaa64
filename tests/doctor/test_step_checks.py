"""The step's reward, and that figures which are wrong fail the check."""

import pytest

from mcore_rl.doctor import step_checks
from mcore_rl.doctor.step_checks import STEPS, Rows, share_of_even_tokens
from mcore_rl.types import Prompt, Sample, VersionSpan, WeightVersion


def test_the_reward_is_the_share_of_even_tokens() -> None:
    prompt = Prompt(0, (1,), (), "random", None)
    span = VersionSpan(0, 4, WeightVersion(0))
    sample = Sample(prompt, 0, (2, 4, 5, 7), (0.0,) * 4, "length", (span,), "")
    assert share_of_even_tokens([sample]).rewards_N == [0.5]


def rows(**last: float) -> Rows:
    log = Rows()
    for step in range(1, STEPS + 1):
        row = {"reward/mean": step / 10, "logprob_diff/mean": 1e-7, "sync/canary_diff": 1e-7}
        log.log(step, row | {"time/train": 0.5})
    log.log(STEPS, last)
    return log


def test_figures_of_a_run_that_learns() -> None:
    figures = step_checks._figures(rows(), {"sync/canary_diff": 3e-7})
    assert figures["reward_first"] == 0.1 and figures["reward_last"] == STEPS / 10
    assert figures["canary_diff"] == 3e-7


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"reward/mean": 0.05}, "rewards"),
        ({"logprob_diff/mean": 0.5}, "samples' log-probs differ by 0.5"),
    ],
)
def test_a_run_that_learns_nothing_or_drifts_fails(last: dict[str, float], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        step_checks._figures(rows(**last), {"sync/canary_diff": 0.0})
