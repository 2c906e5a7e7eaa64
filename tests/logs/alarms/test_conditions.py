"""Each alarm comes at its bound, once per onset, and ends; bounds may follow what was usual."""

from collections.abc import Sequence

import pytest

from mcore_rl.config import AlarmsConfig
from mcore_rl.config.alarms import AlarmRule, parse_rule
from mcore_rl.logs.alarms.conditions import (
    AlarmEvent,
    MetricAlarm,
    list_alarms,
    list_own,
    note_first,
)


def note_all(alarm: MetricAlarm, values: Sequence[float]) -> list[tuple[str, int, float, float]]:
    """Return (state, step, value, bound) of each event."""
    events = [alarm.note(step, {alarm.rule.metric: v}) for step, v in enumerate(values, start=1)]
    return [(e.state, e.step, e.value, e.bound) for e in events if e is not None]


def make(name: str) -> MetricAlarm:
    """Return a built-in alarm."""
    alarms = list_alarms(
        AlarmsConfig(),
        max_response_len=512,
        compares_groups=True,
        reads_rewards=True,
        drift_bound=0.03,
    )
    [alarm] = [alarm for alarm in alarms if alarm.name == name]
    return alarm


@pytest.mark.parametrize(
    ("name", "good", "bad", "bound"),
    [
        ("signal", 0.9, 1.0, 1.0),
        ("truncated", 0.99, 1.0, 1.0),
        ("drift", 0.03, 0.031, 0.03),
        ("staleness", 8.0, 8.1, 8.0),
    ],
)
def test_an_alarm_comes_after_five_steps_beyond_its_bound(
    name: str, good: float, bad: float, bound: float
) -> None:
    values = [good] * 3 + [bad] * 7 + [good] * 5 + [bad] * 5
    told = [("on", 8, bad, bound), ("cleared", 15, good, bound), ("on", 20, bad, bound)]
    assert note_all(make(name), values) == told


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("reward_errors", (0.05, 0.06)),
        ("engine_down", (0.0, 1.0)),
        ("saves", (0.0, 1.0)),
        ("skipped", (0.0, 0.5)),
    ],
)
def test_what_failed_is_told_at_once(name: str, values: tuple[float, float]) -> None:
    good, bad = values
    told = note_all(make(name), [good, bad, bad, good])
    assert told == [("on", 2, bad, good), ("cleared", 4, good, good)]


def test_entropy_and_length_are_compared_with_the_first_steps() -> None:
    assert note_all(make("entropy"), [2.0] * 5 + [0.2] * 9 + [0.19] * 5) == [("on", 19, 0.19, 0.2)]
    growing = [10.0, 12.0, 11.0, 10.0, 9.0, *[40.0] * 5, *[41.0] * 5]
    assert note_all(make("length"), growing) == [("on", 15, 41.0, 40.0)]


def test_speed_is_compared_with_what_was_usual_of_late() -> None:
    """A slow rise of the usual speed raises the bound; slow steps do not lower it."""
    speeds = [100.0] * 5 + [400.0] * 20 + [190.0] * 30 + [210.0] * 5
    assert note_all(make("speed"), speeds) == [
        ("on", 30, 190.0, 200.0),
        ("cleared", 60, 210.0, pytest.approx(200.0)),
    ]


def test_a_slow_engine_is_named_once_it_lags_in_five_steps() -> None:
    alarms = list_alarms(
        AlarmsConfig(),
        **{"max_response_len": 512, "drift_bound": 0.03},
        **{"compares_groups": True, "reads_rewards": True},
    )
    [alarm] = [alarm for alarm in alarms if alarm.name == "slow_engine"]
    rows = [{"engines/lag": 3.1, "engines/slowest": 2.0}] * 5
    events = [alarm.note(step, row) for step, row in enumerate(rows, 3)]
    assert events[:4] == [None] * 4 and events[4] is not None
    expected = "alarm: slow_engine, steps 3 to 7: engines/lag=3.1, above 2: engine 2: a step waits"
    assert events[4].text.startswith(expected)


def test_a_bound_of_zero_is_off() -> None:
    options = AlarmsConfig(
        signal=False,
        truncated=0,
        entropy=0,
        length=0,
        drift=False,
        staleness=0,
        speed=0,
        slow_engine=0,
        slow_rank=0,
        engine_down=False,
        saves=False,
        skipped=False,
    )
    alarms = list_alarms(
        options, max_response_len=512, compares_groups=True, reads_rewards=True, drift_bound=0.03
    )
    assert [alarm.name for alarm in alarms] == ["reward_errors"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("kl/ref > 0.2 for 3 steps", AlarmRule("kl/ref", ">", 0.2, 3)),
        ("eval/greedy_accuracy<5e-1 for 1 step", AlarmRule("eval/greedy_accuracy", "<", 0.5, 1)),
        ("loss/grad_norm >= 10", AlarmRule("loss/grad_norm", ">=", 10.0, 7)),
    ],
)
def test_a_rule_names_metric_bound_and_steps(text: str, rule: AlarmRule) -> None:
    assert parse_rule(text, 7) == rule


@pytest.mark.parametrize("text", ["kl/ref", "kl/ref = 1", "kl/ref > x", "kl/ref > 1 for 0 steps"])
def test_another_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"alarms\.when: .* is no rule; write one as 'kl/ref > 0"):
        AlarmsConfig(when=[text])


def test_an_own_rule_counts_only_rows_that_have_its_metric() -> None:
    [alarm] = list_own(AlarmsConfig(when=["kl/ref > 0.2 for 2 steps"]))
    rows = [{"kl/ref": 0.3}, {"loss/entropy": 1.0}, {"kl/ref": float("nan")}, {"kl/ref": 0.25}]
    events = [alarm.note(step, row) for step, row in enumerate(rows, start=1)]
    event = events[3]
    assert events[:3] == [None] * 3
    assert isinstance(event, AlarmEvent)
    assert "kl/ref=0.25, above 0.2" in event.text


def test_the_first_steps_of_a_run_are_read_from_the_rows_of_its_earlier_launch() -> None:
    alarm = make("entropy")
    rows = [{"loss/entropy": 2.0}, {"loss/entropy": None}, {}, *[{"loss/entropy": 2.0}] * 9]
    note_first([alarm], rows)
    assert not alarm.is_learning
    assert note_all(alarm, [0.1] * 5) == [("on", 5, 0.1, 0.2)]
