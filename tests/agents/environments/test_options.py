"""Options without sense are refused by name."""

import pytest

from mcore_rl.agents.environments.worker_process import EnvironmentOptions


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kind": ""}, "needs a kind"),
        ({"workers": 0}, "workers is 0: at least 1"),
        ({"episodes_per_worker": -1}, "episodes_per_worker is -1: at least 1"),
        ({"memory_gib": -0.5}, "memory_gib is -0.5: 0 for no bound"),
        ({"step_timeout_s": 0}, "step_timeout_s is 0: more than 0 seconds"),
        ({"variables": {"SEED": 3}}, "SEED is 3, not text: quote it"),
    ],
)
def test_a_senseless_option_is_named(given, text):
    with pytest.raises(ValueError, match=text):
        EnvironmentOptions(**{"kind": "tools", **given})
