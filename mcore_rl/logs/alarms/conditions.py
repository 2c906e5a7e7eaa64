"""Decides after each row of metrics which alarms begin and which are over.

metrics of a row --> beyond its bound, for so many rows in a row? --> AlarmEvent: on, later cleared

A bound is a number, or a factor of what the metric was in the run's first steps or usually is.
"""

import math
import operator
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mcore_rl.config.alarms import AlarmRule, AlarmsConfig

Compare = Callable[[float, float], bool]
RELATIONS: Mapping[str, tuple[Compare, str]] = {
    ">": (operator.gt, "above"),
    "<": (operator.lt, "below"),
    ">=": (operator.ge, "at or above"),
    "<=": (operator.le, "at or below"),
}
NUM_FIRST = 5
"""The first so many values of a metric are those that a bound of kind "first" is a factor of."""
NUM_USUAL = 20
"""The median of so many values is what is usual; values beyond the bound are none of them."""


@dataclass(frozen=True)
class AlarmEvent:
    """An alarm that begins or is over.

    state   "on" or "cleared"
    text    one line for people, with value, bound and remedy
    """

    alarm: str
    state: Literal["on", "cleared"]
    step: int
    metric: str
    value: float
    bound: float
    text: str


@dataclass
class MetricAlarm:
    """A rule under a name, with what to do about it, and how long it has been met.

    of    "": the rule's bound is a number; "first" or "usual": a factor of these values
    rank  the metric with the number of what the alarm names, a `role`; "": none
    """

    name: str
    rule: AlarmRule
    remedy: str
    of: Literal["", "first", "usual"] = ""
    rank: str = ""
    role: str = "trainer rank"
    is_on: bool = False
    _is_met: bool = False
    _num_in_row: int = 0
    _known: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_USUAL))

    def note(self, step: int, metrics: Mapping[str, float]) -> AlarmEvent | None:
        """Return what this row begins or ends; None if nothing, or without the metric."""
        value = metrics.get(self.rule.metric)
        if value is None or math.isnan(value):
            return None
        bound = self._find_bound()
        if bound is None:
            self._known.append(value)
            return None
        is_met = RELATIONS[self.rule.relation][0](value, bound)
        if self.of == "usual" and not is_met:
            self._known.append(value)
        self._num_in_row = self._num_in_row + 1 if is_met == self._is_met else 1
        self._is_met = is_met
        if self._num_in_row < self.rule.steps or is_met == self.is_on:
            return None
        self.is_on = is_met
        state = "on" if is_met else "cleared"
        who = f"{self.role} {metrics[self.rank]:.0f}: " if self.rank else ""
        text = self._describe(step, value, bound, who)
        return AlarmEvent(self.name, state, step, self.rule.metric, value, bound, text)

    @property
    def is_learning(self) -> bool:
        """Return whether the first values of the metric are not all known yet."""
        return self.of == "first" and len(self._known) < NUM_FIRST

    def learn(self, metrics: Mapping[str, float | None]) -> None:
        """Take over a value of an earlier launch of the run."""
        value = metrics.get(self.rule.metric)
        if value is not None and math.isfinite(value):
            self._known.append(value)

    def _find_bound(self) -> float | None:
        """Return the bound; None as long as what it is a factor of is not known."""
        if not self.of:
            return self.rule.bound
        if len(self._known) < NUM_FIRST:
            return None
        return self.rule.bound * statistics.median(self._known)

    def _describe(self, step: int, value: float, bound: float, who: str) -> str:
        shown = f"{self.rule.metric}={value:.4g}"
        if not self.is_on:
            return f"alarm over: {self.name}, step {step}: {shown}"
        first = step - self.rule.steps + 1
        steps = f"step {step}" if self.rule.steps == 1 else f"steps {first} to {step}"
        beyond = f"{RELATIONS[self.rule.relation][1]} {bound:.4g}"
        if self.of:
            usual = {"first": "of the first steps", "usual": "of late"}[self.of]
            beyond += f" ({self.rule.bound:g} times that {usual})"
        return f"alarm: {self.name}, {steps}: {shown}, {beyond}: {who}{self.remedy}"


def list_alarms(
    options: AlarmsConfig,
    *,
    max_response_len: int,
    compares_groups: bool,
    reads_rewards: bool,
    drift_bound: float,
) -> list[MetricAlarm]:
    """Return the alarms of a run of reinforcement learning, those of alarms.when included.

    max_response_len   rollout.max_response_len
    compares_groups    the advantage compares a prompt's samples with one another; others compare
                       all samples of a step, or these with a critic's values
    reads_rewards      False: a teacher's log-probs take the place of rewards
    drift_bound        mean |trainer - engine| in nats; 0: none
    """
    alarms = [*_list_of_answers(options, max_response_len), *_list_of_policy(options, drift_bound)]
    alarms += _list_of_engines(options)
    if reads_rewards:
        alarms += _list_of_rewards(options, compares_groups)
    return [*alarms, *list_of_training(options)]


def list_of_training(options: AlarmsConfig) -> list[MetricAlarm]:
    """Return the alarms that every training run has, and the alarms of alarms.when."""
    alarms = []
    if options.saves:
        alarms.append(
            MetricAlarm(
                "saves",
                AlarmRule("checkpoint/failed", ">", 0.0, 1),
                "logs/controller.log names the file and the reason; free some space, or the run's"
                " end loses all steps since the newest checkpoint",
            )
        )
    if options.skipped:
        alarms.append(
            MetricAlarm(
                "skipped",
                AlarmRule("train/skipped_share", ">", 0.0, 1),
                "logs/controller.log names the loss, the gradient's norm and the file in skipped/"
                " that has the batch",
            )
        )
    if options.slow_rank:
        alarms.append(
            MetricAlarm(
                "slow_rank",
                AlarmRule("ranks/lag", ">", options.slow_rank, options.steps),
                "all ranks wait for it in each step: see logs/trainer_rank<k>.log, and the clocks,"
                " the temperature and what else runs on its machine",
                rank="ranks/slowest",
            )
        )
    return alarms + list_own(options)


def list_own(options: AlarmsConfig) -> list[MetricAlarm]:
    """Return the alarms of alarms.when."""
    return [
        MetricAlarm(text, rule, "as alarms.when says")
        for text, rule in zip(options.when, options.rules, strict=True)
    ]


def note_first(alarms: Iterable[MetricAlarm], rows: Iterable[Mapping[str, float | None]]) -> None:
    """Take the first values of metrics from the rows of an earlier launch."""
    learning = [alarm for alarm in alarms if alarm.is_learning]
    for row in rows:
        for alarm in learning:
            alarm.learn(row)
        learning = [alarm for alarm in learning if alarm.is_learning]
        if not learning:
            return


def _list_of_answers(options: AlarmsConfig, max_response_len: int) -> Iterator[MetricAlarm]:
    steps = options.steps
    if options.truncated:
        rule = AlarmRule("rollout/truncated_share", ">=", options.truncated, steps)
        remedy = (
            f"responses are cut off at rollout.max_response_len={max_response_len}: raise it, or"
            " see in samples.jsonl why the model does not end its answers"
        )
        yield MetricAlarm("truncated", rule, remedy)
    if options.length:
        rule = AlarmRule("rollout/response_len", ">", options.length, steps)
        remedy = (
            "answers grow: see in samples.jsonl whether they repeat themselves; set"
            " reward.overlong_buffer_len, or an algorithm.aggregation that long answers do not win"
            " by"
        )
        yield MetricAlarm("length", rule, remedy, of="first")


def _list_of_policy(options: AlarmsConfig, drift_bound: float) -> Iterator[MetricAlarm]:
    steps = options.steps
    if options.entropy:
        rule = AlarmRule("loss/entropy", "<", options.entropy, steps)
        remedy = (
            "the policy gives one answer alone: raise algorithm.clip_high, set algorithm.kl.coef,"
            " lower train.optimizer.lr, or start from an earlier checkpoint"
        )
        yield MetricAlarm("entropy", rule, remedy, of="first")
    if options.drift and drift_bound:
        rule = AlarmRule("logprob_diff/mean", ">", drift_bound, steps)
        remedy = (
            "trainer and engines disagree on log-probs: see docs/debugging.md#weights, or set"
            " algorithm.correction.weight=token"
        )
        yield MetricAlarm("drift", rule, remedy)
    if options.staleness:
        rule = AlarmRule("staleness/mean", ">", options.staleness, steps)
        remedy = (
            "samples are older than the step can use: lower rollout.max_staleness, or give engines"
            " more GPUs"
        )
        yield MetricAlarm("staleness", rule, remedy)


def _list_of_engines(options: AlarmsConfig) -> Iterator[MetricAlarm]:
    if options.speed:
        rule = AlarmRule("rollout/tokens_per_second", "<", options.speed, options.steps)
        remedy = (
            "engines answer more slowly: see logs/sglang_*.log, the timeline of `mcore-rl view`,"
            " and what else runs on these machines"
        )
        yield MetricAlarm("speed", rule, remedy, of="usual")
    if options.slow_engine:
        rule = AlarmRule("engines/lag", ">", options.slow_engine, options.steps)
        remedy = (
            "a step waits for its last responses: see logs/sglang_<k>.log, and the clocks, the"
            " temperature and what else runs on its machine"
        )
        yield MetricAlarm("slow_engine", rule, remedy, rank="engines/slowest", role="engine")
    if options.engine_down:
        rule = AlarmRule("sync/engines_failed", ">", 0.0, 1)
        remedy = (
            "an engine has no weights, and the others answer for it: see logs/controller.log and"
            " its logs/sglang_*.log"
        )
        yield MetricAlarm("engine_down", rule, remedy)


def _list_of_rewards(options: AlarmsConfig, compares_groups: bool) -> Iterator[MetricAlarm]:
    if options.signal:
        rule = AlarmRule("reward/std", "<=", 0.0, options.steps)
        among = "of a step"
        if compares_groups:
            rule = AlarmRule("reward/groups_without_signal", ">=", 1.0, options.steps)
            among = "of each prompt"
        remedy = (
            f"all rewards {among} are equal, so there is nothing to learn from: see the answers in"
            " samples.jsonl; take prompts that the model answers sometimes right, or set"
            " rollout.dynamic_sampling=true or a larger rollout.samples_per_prompt"
        )
        yield MetricAlarm("signal", rule, remedy)
    rule = AlarmRule("reward/failed_share", ">", options.reward_errors, 1)
    yield MetricAlarm("reward_errors", rule, "samples.jsonl has the errors as reward_error")
