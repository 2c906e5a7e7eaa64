"""run.debug lifts every deadline that a stopped process would miss."""

from mcore_rl.config import Config
from mcore_rl.config.tree import with_settings
from mcore_rl.run.settings import LONG_S, for_debugger


def test_only_debug_lifts_deadlines_and_calls_the_reward_in_the_controller() -> None:
    config = with_settings(Config(), {"reward.workers": 4, "judge.url": "http://judge"})
    assert for_debugger(config) is config
    lifted = for_debugger(with_settings(config, {"run.debug": True}))
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
