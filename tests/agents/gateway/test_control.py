"""Rewards, models and progress."""

import pytest

from mcore_rl.agents.gateway.api import ApiError, BadRequestError
from mcore_rl.agents.gateway.gateway import add_reward, make_model_list, read_reward
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
    (entry,) = make_model_list("m")["data"]
    assert (entry["object"], entry["type"], entry["display_name"]) == ("model", "model", "m")
