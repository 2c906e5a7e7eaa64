"""Replays drawn failures over many steps, with recovery from partner memory and with restarts.

    a step                work + keep -> wait for samples -> sync -> save, if one is due
    partner memory        a loss in work, sync or save cuts it off: recover, do it again;
                          one in the wait: recover while engines sample, or if they have the same
                          GPUs, when ranks are called next
    restarts              a loss at any time: queue again, start, go back to the newest checkpoint

Each kind of failure is a Poisson process whose times follow from the seed, whatever a run does
about them. Engines are started again while others go on: each loss delays its step.
"""

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import stdev

from mcore_rl.run.roles.recovery import backoff_s
from mcore_rl.tools.simulate.recovery_costs import CheckpointCosts, RecoveryCosts

HOUR_S = 3600.0
MOST_IN_VAIN = 1000
"""After so many losses without a further step a run is given up."""
NUM_PARTS = 20
"""Parts of a replay whose times give the error of the whole."""
MOST_SKIPPED = 1000
"""Failures of an interval that are drawn one by one; of more, the next one alone is drawn."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's parts, without failures, copies and saves.

    ideal_s     of the whole step, if nothing is slow
    work_s      of log-probs and training
    wait_s      in which ranks wait for samples
    sync_s      of the weight sync
    is_beside   engines sample beside the work: a delay of the work shortens the wait
    refill_s    by which the first step after a start is longer, as no samples are there
    is_apart    ranks have GPUs of their own, so that engines sample during a recovery
    """

    ideal_s: float
    work_s: float
    wait_s: float
    sync_s: float
    is_beside: bool
    refill_s: float
    is_apart: bool = False

    @property
    def step_s(self) -> float:
        return self.work_s + self.wait_s + self.sync_s


@dataclass(frozen=True)
class FaultCosts:
    """The costs of failures, and how often failures come.

    restart_s         until processes of a job that is queued again have started
    engine_s          by which the loss of an engine delays the run
    rank_mtbf_s       mean time between failures among all GPUs of trainer and critic; inf: none
    engine_mtbf_s     the same of all engines
    save_every        steps between checkpoints
    most_recoveries   within an hour; one more ends the run, which begins again
    """

    step: StepCosts
    recovery: RecoveryCosts
    checkpoints: CheckpointCosts
    restart_s: float
    engine_s: float
    rank_mtbf_s: float
    engine_mtbf_s: float
    save_every: int
    most_recoveries: int


@dataclass(frozen=True)
class EffectiveTime:
    """The share of a run's time that was effective, and where the rest went.

    effective   seconds of the steps, if nothing failed, was slow, copied or saved, by all seconds
    error       standard error of `effective`
    hours       of the run
    shares      of these hours, by what they were lost to
    counts      of losses of ranks and engines, recoveries and restarts
    no_step     why no further step ended; "": all did
    """

    effective: float
    error: float
    hours: float
    shares: Mapping[str, float]
    counts: Mapping[str, int]
    no_step: str = ""


class _RunLostError(Exception):
    """The run has ended and begins again from a checkpoint."""


class _NoStepError(Exception):
    """Losses come so often that no step ends."""


class _Failures:
    """Times of failures, in seconds."""

    def __init__(self, mtbf_s: float, seed: str) -> None:
        self._mtbf_s = mtbf_s
        self._draw = random.Random(seed)
        self.next_s = 0.0
        self._advance()

    def _advance(self) -> None:
        if math.isinf(self._mtbf_s):
            self.next_s = math.inf
        else:
            self.next_s += self._draw.expovariate(1 / self._mtbf_s)

    def take_until(self, now_s: float) -> int:
        """Return how many failures came until now, and forget them."""
        num = 0
        while self.next_s <= now_s:
            num += 1
            if num == MOST_SKIPPED:
                num += round((now_s - self.next_s) / self._mtbf_s)
                self.next_s = now_s
            self._advance()
        return num


@dataclass
class _Run:
    """A run that is replayed: where it is, and what its time went to."""

    costs: FaultCosts
    recovers: bool
    ranks: _Failures
    engines: _Failures
    now_s: float = 0.0
    step: int = 0
    highest: int = 0
    num_in_vain: int = 0
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)
    recoveries_s: deque[float] = field(default_factory=deque)
    """Times of recoveries within the last hour."""
    num_in_row: int = 0
    """Recoveries since a step was trained."""
    saves: deque[tuple[float, int]] = field(default_factory=deque)
    """Checkpoints: when they are on storage, and their steps."""
    ends_s: list[float] = field(default_factory=list)
    """When each part of the steps was over."""

    def spend(self, what: str, seconds: float) -> None:
        self.now_s += seconds
        self.spent[what] += seconds

    def cut_off(self, seconds: float) -> float | None:
        """Return after how many seconds from now a loss of ranks comes; None: not in so many."""
        if self.ranks.next_s > self.now_s + seconds:
            return None
        self.counts["ranks lost"] += 1
        self.num_in_vain += 1
        if self.num_in_vain > MOST_IN_VAIN:
            raise _NoStepError
        lost_s = max(self.ranks.next_s - self.now_s, 0.0)
        self.ranks.take_until(self.now_s + lost_s)
        return lost_s

    def work(self, parts: Mapping[str, float]) -> None:
        """Do work of the ranks, by what its seconds count as; recover and do it again if need be.

        Raises _RunLostError if lost ranks end the run.
        """
        while True:
            lost_s = self.cut_off(sum(parts.values()))
            if lost_s is None:
                for what, seconds in parts.items():
                    self.spend(what, seconds)
                return
            self.spend("work done again", lost_s)
            self.recover()

    def recover(self) -> None:
        """Recover lost ranks, also those that are lost meanwhile."""
        if not self.recovers:
            raise _RunLostError
        lost_s: float | None = 0.0
        while lost_s is not None:
            while self.recoveries_s and self.recoveries_s[0] <= self.now_s - HOUR_S:
                self.recoveries_s.popleft()
            if len(self.recoveries_s) >= self.costs.most_recoveries:
                raise _RunLostError
            self.recoveries_s.append(self.now_s)
            self.counts["recoveries"] += 1
            self.num_in_row += 1
            seconds = self.costs.recovery.recovery_s + backoff_s(self.num_in_row)
            lost_s = self.cut_off(seconds)
            self.spend("recoveries", seconds if lost_s is None else lost_s)

    def wait(self, seconds: float) -> None:
        """Wait for samples. Raises _RunLostError if lost ranks end the run."""
        if self.recovers and not self.costs.step.is_apart:  # a loss shows later
            self.spend("steps", seconds)
            return
        end_s = self.now_s + seconds
        while (left_s := end_s - self.now_s) > 0:
            lost_s = self.cut_off(left_s)
            self.spend("steps", left_s if lost_s is None else lost_s)
            if lost_s is None:
                return
            begin_s = self.now_s
            self.recover()
            hidden_s = min(self.now_s, end_s) - begin_s
            self.spent["recoveries"] -= hidden_s
            self.spent["steps"] += hidden_s

    def take_step(self) -> None:
        """Do the parts of a step. Raises _RunLostError if the run is lost."""
        step, recovery = self.costs.step, self.costs.recovery
        begin_s = self.now_s
        before = self.spent.copy()
        self.work({"steps": step.work_s, "copies": recovery.keep_s if self.recovers else 0.0})
        self.num_in_row = 0
        kept_s = self.now_s
        delay_s = kept_s - begin_s - step.work_s
        hidden_s = min(delay_s, step.wait_s) if step.is_beside else 0.0
        if hidden_s:
            for what in self.spent.keys() - {"steps"}:
                own_s = self.spent[what] - before[what]
                self.spent[what] -= own_s * hidden_s / delay_s
            self.spent["steps"] += hidden_s
        self.wait(step.wait_s - hidden_s)
        num_engines = self.engines.take_until(self.now_s)
        self.counts["engines lost"] += num_engines
        self.spend("engines", num_engines * self.costs.engine_s)
        self.work({"steps": step.sync_s})
        if self.recovers:
            self.spend("copies", max(kept_s + recovery.mirror_s - self.now_s, 0.0))
        self.step += 1
        if self.step % self.costs.save_every == 0:
            self.work({"saves": self.costs.checkpoints.save_s})
            begin_s = max(self.now_s, self.saves[-1][0]) if self.saves else self.now_s
            self.saves.append((begin_s + self.costs.checkpoints.write_s, self.step))

    def begin_again(self) -> None:
        """Start the run from the newest checkpoint that was on storage."""
        while self.saves and self.saves[-1][0] > self.now_s:
            self.saves.pop()
        self.step = self.saves[-1][1] if self.saves else 0
        again_s = self.spent["steps"] - self.step * self.costs.step.step_s
        self.spent["steps"] -= again_s
        self.spent["work done again"] += again_s
        self.recoveries_s.clear()
        self.num_in_row = 0
        seconds = self.costs.restart_s + self.costs.checkpoints.load_s + self.costs.step.refill_s
        seconds += self.costs.recovery.notice_s
        while True:
            self.counts["restarts"] += 1
            lost_s = self.cut_off(seconds)
            self.spend("restarts", seconds if lost_s is None else lost_s)
            if lost_s is None:
                break
        self.engines.take_until(self.now_s)  # all engines are new

    def note_progress(self, num_steps: int) -> None:
        """Note a step that had not been reached before."""
        if self.step <= self.highest:
            return
        self.highest = self.step
        self.num_in_vain = 0
        if self.highest * NUM_PARTS // num_steps > len(self.ends_s):
            self.ends_s.append(self.now_s)


def replay(costs: FaultCosts, num_steps: int, seed: int, *, recovers: bool) -> EffectiveTime:
    """Return the effective time of so many steps (at least NUM_PARTS) under drawn failures.

    recovers   lost ranks are recovered from partner memory; else the run begins again
    """
    ranks = _Failures(costs.rank_mtbf_s, f"{seed} ranks")
    run = _Run(costs, recovers, ranks, _Failures(costs.engine_mtbf_s, f"{seed} engines"))
    if costs.engine_s >= costs.engine_mtbf_s:
        why = (
            f"engines are lost every {costs.engine_mtbf_s:.3g} s, and each loss delays the run by"
            f" {costs.engine_s:.3g} s"
        )
        return EffectiveTime(0.0, 0.0, 0.0, {}, {}, why)
    try:
        while run.step < num_steps:
            try:
                run.take_step()
            except _RunLostError:
                run.begin_again()
            run.note_progress(num_steps)
    except _NoStepError:
        why = (
            f"no step ended after step {run.highest} in {MOST_IN_VAIN:,} losses of ranks, one every"
            f" {costs.rank_mtbf_s:.3g} s"
        )
        return EffectiveTime(0.0, 0.0, run.now_s / HOUR_S, {}, dict(run.counts), why)
    return _sum_up(run, num_steps)


def _sum_up(run: _Run, num_steps: int) -> EffectiveTime:
    step = run.costs.step
    effective = num_steps * step.ideal_s / run.now_s
    lengths = [end - begin for begin, end in zip([0.0, *run.ends_s], run.ends_s, strict=False)]
    spread = stdev(lengths) / (run.now_s / NUM_PARTS) / math.sqrt(NUM_PARTS)
    slow_s = num_steps * (step.step_s - step.ideal_s)
    lost = {"slow ranks and engines": slow_s, **run.spent}
    del lost["steps"]
    shares = {what: seconds / run.now_s for what, seconds in lost.items()}
    hours = run.now_s / HOUR_S
    return EffectiveTime(effective, effective * spread, hours, shares, dict(run.counts))


def find_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return the seconds between checkpoints that lose least time, for exponential failures.

    Young, "A first order approximation to the optimum checkpoint interval", 1974, as Daly gives it
    for intervals without the save, 2006, equation (20).
    """
    return max(math.sqrt(2 * save_s * mtbf_s) - save_s, 0.0)
