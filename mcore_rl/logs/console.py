"""Shows each step's metrics in the console: a live panel on a terminal, elsewhere a line."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mcore_rl.logs.progress import format_clock, note_printed, show_in_panel, stamp

SHOWN_STEPS = 12
SPARKS = "▁▂▃▄▅▆▇█"
PHASE_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")


@dataclass(frozen=True)
class Column:
    """A column of the console: the first of `names` that was logged, printed with `format`.

    short   the label in a panel, if there it is another
    """

    label: str
    names: tuple[str, ...]
    format: str
    short: str = ""

    def read(self, metrics: Mapping[str, float]) -> str | None:
        value = next((metrics[name] for name in self.names if name in metrics), None)
        return None if value is None else format(value, self.format)


def select_telling(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a row without those that are 0 by construction, and with `signal`.

    The loss of a policy is a mean of advantages, which add up to 0 in a group; with one optimizer
    step the old policy is the policy; in a synchronous run no sample is stale.
    """
    telling = dict(metrics)
    if "reward/mean" in metrics:
        telling.pop("loss/total", None)
        telling.pop("loss/policy", None)
    if metrics.get("train/optimizer_steps", 1.0) == 1.0:
        telling.pop("kl/old_new", None)
    if not metrics.get("staleness/max"):
        telling.pop("staleness/mean", None)
    if (silent := metrics.get("reward/groups_without_signal")) is not None:
        telling[SIGNAL] = 1.0 - silent
    return telling


SIGNAL = "signal"
COLUMNS = (
    Column("reward", ("reward/mean",), ".3f"),
    Column(SIGNAL, (SIGNAL,), ".0%"),
    Column("loss", ("loss/total",), ".4f"),
    Column("KL", ("kl/ref", "kl/old_new"), ".1e"),
    Column("entropy", ("loss/entropy",), ".3f"),
    Column("grad", ("loss/grad_norm",), ".3f"),
    Column("length", ("rollout/response_len",), ".1f"),
    Column("truncated", ("rollout/truncated_share",), ".0%", short="cut"),
    Column("stale", ("staleness/mean",), ".1f"),
    Column("tok/s", ("rollout/tokens_per_second", "train/tokens_per_second"), ",.0f"),
    Column("held-out", ("eval/greedy_accuracy",), ".1%"),
)


class Console(Protocol):
    def show(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Clock:
    """The time since the first step that was shown, and the time that the other steps will take."""

    def __init__(self, total_steps: int | None) -> None:
        self._total_steps = total_steps
        self._first: tuple[int, float] | None = None

    def start(self, step: int) -> None:
        """Begin with `step`, unless a step has begun before."""
        if self._first is None:
            self._first = step, time.monotonic()

    @property
    def has_started(self) -> bool:
        return self._first is not None

    @property
    def elapsed_s(self) -> float:
        return 0.0 if self._first is None else time.monotonic() - self._first[1]

    def describe_rest(self, step: int) -> str:
        """Return "1:20:05 left" at the mean pace so far; empty at both ends of a run."""
        if self._first is None or self._total_steps is None:
            return ""
        if not self._first[0] < step < self._total_steps:
            return ""
        remaining = self.elapsed_s / (step - self._first[0]) * (self._total_steps - step)
        return f"{format_clock(remaining)} left"


class LineConsole:
    """Prints lines such as "14:03:21 step 3/60 | reward 0.512 | rollout 1.2s | 2:05 left"."""

    def __init__(self, stream: TextIO, total_steps: int | None) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._clock = Clock(total_steps)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        self._clock.start(step)
        telling = select_telling(metrics)
        values = [(column.label, column.read(telling)) for column in COLUMNS]
        parts = [f"step {_format_progress(step, self._total_steps)}"]
        parts += [f"{label} {value}" for label, value in values if value is not None]
        parts.append(
            " ".join(f"{phase} {s:.1f}s" for phase, s in select_phase_seconds(metrics).items())
        )
        parts.append(self._clock.describe_rest(step))
        line = stamp(" | ".join(part for part in parts if part), self._stream.isatty())
        print(line, file=self._stream, flush=True)
        note_printed()

    def close(self) -> None:
        self._stream.flush()


class LiveConsole:
    """A panel with progress, rewards, the last steps as a table, phases of the last step, and what
    the run is doing, which a thread of logs.progress brings.
    """

    def __init__(self, console: RichConsole, title: str, total_steps: int | None) -> None:
        self._title = title
        self._total_steps = total_steps
        self._steps: dict[int, dict[str, float]] = {}
        self._rewards: deque[float] = deque(maxlen=60)
        self._phases: dict[str, float] = {}
        self._clock = Clock(total_steps)
        self._step = 0
        self._stage = ""
        self._lock = Lock()
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()
        show_in_panel(self._show_stage)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._note(step, metrics)
            self._live.update(self._draw(step), refresh=True)

    def _show_stage(self, stage: str) -> None:
        with self._lock:
            self._stage = stage
            if self._clock.has_started:
                self._live.update(self._draw(self._step), refresh=True)
            else:
                self._live.update(Panel(Text(stage), border_style="dim"), refresh=True)

    def _note(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._stage = ""
        self._clock.start(step)
        self._steps.setdefault(step, {}).update(select_telling(metrics))
        if math.isfinite(reward := metrics.get("reward/mean", math.nan)):
            self._rewards.append(reward)
        self._phases = select_phase_seconds(metrics) or self._phases
        while len(self._steps) > SHOWN_STEPS:
            del self._steps[min(self._steps)]

    def close(self) -> None:
        show_in_panel(None)
        self._live.stop()

    def _draw(self, step: int) -> Panel:
        parts: list[RenderableType] = [self._draw_progress(step), _draw_table(self._steps)]
        if self._rewards:
            parts.append(Text(f"reward  {draw_sparkline(self._rewards)}", style="green"))
        if self._phases:
            parts.append(_draw_phases(self._phases))
        if self._stage:
            parts.append(Text(self._stage, style="dim"))
        return Panel(Group(*parts), title=Text(self._title), border_style="dim")

    def _draw_progress(self, step: int) -> Table:
        elapsed = format_clock(self._clock.elapsed_s)
        text = f"step {_format_progress(step, self._total_steps)}   {elapsed}"
        grid = Table.grid(padding=(0, 2))
        if self._total_steps is None:
            grid.add_row(text)
            return grid
        if rest := self._clock.describe_rest(step):
            text += f"   {rest}"
        grid.add_row(text, ProgressBar(total=self._total_steps, completed=step, width=36))
        return grid


def make_console(stream: TextIO, title: str, total_steps: int | None) -> Console:
    console = RichConsole(file=stream)
    if console.is_terminal:
        return LiveConsole(console, title, total_steps)
    return LineConsole(stream, total_steps)


def select_phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase, from time/<phase>, that took at least 0.05 s."""
    seconds = {
        name.removeprefix("time/"): value
        for name, value in metrics.items()
        if name.startswith("time/")
    }
    seconds.pop("step", None)
    return {phase: value for phase, value in seconds.items() if value >= 0.05}


def _draw_table(steps: Mapping[int, Mapping[str, float]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    shown = [c for c in COLUMNS if any(c.read(metrics) is not None for metrics in steps.values())]
    for label in ("step", *(column.short or column.label for column in shown)):
        table.add_column(label, justify="right", no_wrap=True)
    for step, metrics in sorted(steps.items()):
        table.add_row(str(step), *(column.read(metrics) or "" for column in shown))
    return table


def _draw_phases(seconds: Mapping[str, float], width: int = 60) -> Text:
    """Return a bar divided into the phases of a step, and a legend with their seconds."""
    bar = Text()
    legend = Text()
    total = sum(seconds.values())
    for (phase, value), color in zip(seconds.items(), PHASE_COLORS * len(seconds), strict=False):
        bar.append("━" * max(round(width * value / total), 1), style=color)
        legend.append(f"  {phase} {value:.1f}s", style=color)
    return bar.append("\n").append(legend)


def draw_sparkline(values: Sequence[float] | deque[float]) -> str:
    """Return one bar per value; the smallest value has the lowest bar, the largest the highest."""
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)


def _format_progress(step: int, total_steps: int | None) -> str:
    return str(step) if total_steps is None else f"{step}/{total_steps}"
