"""Rewards, models and progress."""

import pytest

from mcore_rl.agents.gateway.api import ApiError, BadRequestError
from mcore_rl.agents.gateway.gateway import add_reward, read_reward
from mcore_rl.agents.gateway.models import choose_adapter, make_model_list
from mcore_rl.agents.messages import EndReason, EpisodeEndedError
from tests.support.episode_chats import RecordingChat


def test_a_reward_is_a_finite_number():
    assert read_reward({"reward": 1}) == (1.0, None)
    assert read_reward({"reward": -0.5, "turn": 3}) == (-0.5, 3)
    for wrong in (None, True, "1", float("nan"), float("inf")):
        with pytest.raises(BadRequestError, match="reward"):
            read_reward({"reward": wrong})


def test_a_turn_that_the_recorder_does_not_know_is_the_clients_mistake():
    with pytest.raises(BadRequestError, match="no turn 3"):
        add_reward(RecordingChat(), 1.0, 3)


def test_a_reward_for_an_episode_that_takes_none_is_refused():
    class Closed(RecordingChat):
        def add_reward(self, reward, turn):
            raise EpisodeEndedError(EndReason.DONE)

    with pytest.raises(ApiError, match="over") as caught:
        add_reward(Closed(), 1.0, None)
    assert caught.value.code == "episode_over"


def test_models_are_listed_in_both_formats():
    first, last = make_model_list(("m", "n"))["data"]
    assert (first["object"], first["type"], first["display_name"]) == ("model", "model", "m")
    assert last["id"] == make_model_list(("m", "n"))["last_id"] == "n"


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        *((name, "") for name in ("", "ada", "x:ada", "policy")),
        *((name, "base") for name in ("base", "some/model:base")),
    ],
)
def test_a_request_names_the_policy_or_what_is_served_beside_it(model: str, chosen: str):
    assert choose_adapter(model, "ada", ("base",)) == chosen
    assert choose_adapter("anything", "ada", ()) == ""


def test_a_name_that_nothing_has_is_refused_with_those_that_there_are():
    for model in ("adda", "base:x", "x" * 1000):
        with pytest.raises(ApiError, match="name one of ada, base") as caught:
            choose_adapter(model, "ada", ("base",))
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        assert len(caught.value.message) < 200
