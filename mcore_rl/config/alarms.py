"""Options of alarms: which metrics are watched, and who is told (docs/monitoring.md)."""

import re
from dataclasses import dataclass, field

from mcore_rl.config.bounds import Options, bounded

_RULE = re.compile(
    r"\s*(?P<metric>[\w/.-]+)\s*(?P<relation>>=|<=|>|<)\s*(?P<bound>[-+\d.eE]+)"
    r"(?:\s+for\s+(?P<steps>\d+)\s+steps?)?\s*"
)


@dataclass(frozen=True)
class AlarmRule:
    """A metric and the bound beyond which it raises an alarm.

    relation   >, <, >= or <=
    steps      rows in a row with the metric beyond the bound before the alarm is told
    """

    metric: str
    relation: str
    bound: float
    steps: int


def parse_rule(text: str, steps: int) -> AlarmRule:
    """Return the rule "metric > bound for n steps"; `steps` count where it names none.

    Raises ValueError without the option's name.
    """
    found = _RULE.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        num_steps = int(found["steps"] or steps)
        if num_steps < 1:
            raise ValueError
        return AlarmRule(found["metric"], found["relation"], float(found["bound"]), num_steps)
    except ValueError:
        raise ValueError(
            f"{text!r} is no rule; write one as 'kl/ref > 0.2 for 3 steps', with >, <, >= or <="
        ) from None


@dataclass
class AlarmsConfig(Options, group="alarms"):
    """Bounds of metrics beyond which a run warns, once per onset (docs/monitoring.md)."""

    steps: int = bounded(5, ge=1)
    """Steps in a row that are beyond a bound before an alarm is told, and within it before it is
    over. reward_errors, engine_down, saves and skipped take one step."""
    signal: bool = True
    """All rewards of each prompt, or of the step, are equal: nothing is learned."""
    truncated: float = bounded(1.0, ge=0, le=1)
    """Share of responses cut off at rollout.max_response_len, from which on; 0: off."""
    entropy: float = bounded(0.1, ge=0, lt=1)
    """Entropy below this part of that of the run's first 5 steps; 0: off."""
    length: float = bounded(4.0, gt=1, also=0)
    """Mean response length above so many times that of the first 5 steps; 0: off."""
    drift: bool = True
    """Log-probs of trainer and engine differ by more than drift.warn_above."""
    staleness: float = bounded(8.0, ge=0)
    """Mean staleness above so many versions of the weights; 0: off."""
    reward_errors: float = bounded(0.05, ge=0, le=1)
    """Share of samples whose rewards failed, above which; 1: off. reward.max_failed_share is the
    share that ends the run."""
    engine_down: bool = True
    """An engine has no weights, as it failed or was left out."""
    saves: bool = True
    """A checkpoint could not be written (checkpoint.on_error=continue)."""
    skipped: bool = True
    """An optimizer step was left out, as its loss or gradient was not finite or too large."""
    slow_engine: float = bounded(2.0, gt=1, also=0)
    """An engine takes above so many times as long for a token as others in the median, at the same
    load; 0: off."""
    slow_rank: float = bounded(2.0, gt=1, also=0)
    """A rank of the trainer works above so many times as long as others in the median; 0: off."""
    speed: float = bounded(0.5, ge=0, lt=1)
    """Response tokens per second below this part of the median of the last 20 steps; 0: off."""
    when: list[str] = field(default_factory=list)
    """Further rules, such as ["kl/ref > 0.2 for 3 steps", "eval/greedy_accuracy < 0.5 for 1 step"];
    docs/metrics.md has the names."""
    webhook: str = ""
    """URL that gets each alarm by POST as JSON (https://..., a secret); empty: none."""
    command: list[str] = field(default_factory=list)
    """Program and arguments that get each alarm as JSON on standard input; empty: none."""
    timeout_s: float = bounded(5.0, gt=0, le=60)
    """Deadline of the webhook and the command, beside which the run goes on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.when:
            try:
                parse_rule(text, self.steps)
            except ValueError as error:
                raise ValueError(f"alarms.when: {error}") from None

    @property
    def rules(self) -> list[AlarmRule]:
        """Return the rules of `when`."""
        return [parse_rule(text, self.steps) for text in self.when]
