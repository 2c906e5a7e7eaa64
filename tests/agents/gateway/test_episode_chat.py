"""The error of a policy that is busy."""

from mcore_rl.agents.gateway.sessions import OverloadedError


def test_an_overloaded_policy_says_when_to_ask_again():
    busy = OverloadedError(0.5)
    assert busy.retry_after_s == 0.5
    assert "0.5 s" in str(busy)
