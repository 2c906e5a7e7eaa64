"""Bodies and statuses of errors."""

import pytest

from mcore_rl.agents.gateway.api import (
    ApiError,
    make_anthropic_error,
    make_episode_over,
    make_openai_error,
    make_overloaded,
    refuse_unsupported,
)
from mcore_rl.agents.messages import EndReason, EpisodeEndedError


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (504, "server_error", "api_error"),
    ],
)
def test_types_of_errors_follow_their_status(status, openai, anthropic):
    error = ApiError(status, "code", "message")
    assert make_openai_error(error)["error"]["type"] == openai
    assert make_anthropic_error(error)["error"]["type"] == anthropic


def test_an_episode_that_is_over_is_no_reason_to_ask_again():
    error = make_episode_over(EpisodeEndedError(EndReason.DEADLINE, "900 s"))
    assert error.status not in (408, 409, 429)
    assert error.status < 500
    assert error.message == "the episode is over: deadline: 900 s"


def test_the_wait_is_rounded_up():
    headers = make_overloaded(1.2001).headers
    assert headers == {"Retry-After": "2", "retry-after-ms": "1201"}


def test_a_refusal_names_the_field_and_a_remedy():
    error = refuse_unsupported("n", "send more requests").error
    assert (error.param, error.code) == ("n", "unsupported_parameter")
    assert error.message.endswith("send more requests")
