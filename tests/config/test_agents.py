"""Options of episodes are read only with an environment, and fit the other options."""

import pytest

from mcore_rl.config import Config
from mcore_rl.config.agents import AgentsConfig


def test_an_environment_makes_samples_episodes() -> None:
    assert AgentsConfig(environment="tools").is_used and not AgentsConfig().is_used


def test_options_without_an_environment_are_refused() -> None:
    with pytest.raises(ValueError, match=r"agents.max_turns=3 with agents.environment=''"):
        Config(agents=AgentsConfig(max_turns=3))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"agents.max_turn_len=513 exceeds rollout.max_response"):
        Config(agents=AgentsConfig(environment="tools", max_turn_len=513))
