"""Turns a recipe into one whose run can be stopped in a debugger for as long as one likes."""

from mcore_rl.config import Config
from mcore_rl.config.tree import with_settings

LONG_S = 7 * 24 * 3600.0
"""In place of deadlines that a stopped process would miss, or have others miss."""


def for_debugger(config: Config) -> Config:
    """Return the recipe with deadlines of a week, and its reward function in the collectors.

    Without run.debug it is returned as it is. A worker process of reward.workers is none of Ray's,
    so no debugger would find it.
    """
    if not config.run.debug:
        return config
    options = ["run.call_timeout_s", "run.startup_timeout_s", "rollout.request_timeout_s"]
    options.append("reward.timeout_s")
    options += [f"{role}.request_timeout_s" for role in config.served_models]
    return with_settings(config, {**dict.fromkeys(options, LONG_S), "reward.workers": 0})
