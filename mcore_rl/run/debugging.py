"""Extends a recipe's deadlines to a week, so that a debugger may stop its run."""

from mcore_rl.config import Config
from mcore_rl.config.tree import with_settings

LONG_S = 7 * 24 * 3600.0
"""Replaces each deadline that a stopped process would miss or make other processes miss."""


def for_debugger(config: Config) -> Config:
    """Return the recipe with deadlines of a week, and its reward function in the collectors.

    Without run.debug the recipe is returned as it is. Ray does not know the worker processes of
    reward.workers, so no debugger would find them.
    """
    if not config.run.debug:
        return config
    options = ["run.call_timeout_s", "run.startup_timeout_s", "rollout.request_timeout_s"]
    options.append("reward.timeout_s")
    options += [f"{role}.request_timeout_s" for role in config.served_models]
    return with_settings(config, {**dict.fromkeys(options, LONG_S), "reward.workers": 0})
