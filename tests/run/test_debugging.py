"""run.debug lifts every deadline that a stopped process would miss."""

from mcore_rl.config import Config
from mcore_rl.config.tree import with_settings
from mcore_rl.run.settings import LONG_S, make_debug_settings


def test_no_deadline_ends_a_run_and_the_reward_is_called_in_the_collectors() -> None:
    config = with_settings(Config(), {"reward.workers": 4, "judge.url": "http://judge"})
    lifted = with_settings(config, make_debug_settings(config.served_models))
    deadlines = (
        lifted.run.call_timeout_s,
        lifted.run.startup_timeout_s,
        lifted.rollout.request_timeout_s,
        lifted.reward.timeout_s,
        lifted.judge.request_timeout_s,
    )
    assert set(deadlines) == {LONG_S}
    assert lifted.reward.workers == 0
    assert lifted.teacher == config.teacher, "an option that nothing reads would be refused"
