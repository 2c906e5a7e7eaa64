"""Keeps the numbers of metrics.jsonl as series, and thins long ones for a chart."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.tools.view.followed import FollowedRows
from mcore_rl.tools.view.sample_index import ODD_ROW, read_row

MOST_POINTS = 1500
"""Points of a series in an answer; neighbors of longer ones are averaged."""
AXES = ("step", "sample", "time")
_FORMER = ("refit/", "time/refit", "time/settle")
"""Values that are written a second time, under names of version 0.1."""
_NAN = float("nan")


class _Series:
    """Values of one metric, with the number of the row that has each."""

    def __init__(self) -> None:
        self.rows = array("q")
        self.values = array("d")


class MetricTable:
    """The metrics of a run folder, and those that are added."""

    def __init__(self, run_dir: Path) -> None:
        self._file = FollowedRows(run_dir / "metrics.jsonl")
        self._forget()

    def _forget(self) -> None:
        self._series: dict[str, _Series] = {}
        self._axes = {"step": array("q"), "sample": array("d"), "time": array("d")}
        self._num_samples = 0.0
        self._start_s: float | None = None
        self.num_bad = 0

    @property
    def num_rows(self) -> int:
        return len(self._axes["step"])

    def refresh(self) -> bool:
        """Take further rows, of a block at most; return whether all are taken."""
        new = self._file.read_new()
        if new.is_restart:
            self._forget()
        for _, line in new.lines:
            try:
                self._add(read_row(line))
            except ODD_ROW:
                self.num_bad += 1
        return new.is_end

    def _add(self, row: dict[str, Any]) -> None:
        step = int(row.pop("step", 0))
        timestamp = row.pop("timestamp", None)
        if self._start_s is None and timestamp is not None:
            self._start_s = timestamp
        number = self.num_rows
        self._num_samples += row.get("rollout/samples") or 0.0
        self._axes["step"].append(step)
        self._axes["sample"].append(self._num_samples)
        elapsed = _NAN if timestamp is None else timestamp - (self._start_s or 0.0)
        self._axes["time"].append(elapsed)
        for name, value in row.items():
            if isinstance(value, int | float) and not name.startswith(_FORMER):
                series = self._series.setdefault(name, _Series())
                series.rows.append(number)
                series.values.append(value)

    def names(self) -> list[str]:
        return sorted(self._series)

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric, None if it was never logged."""
        series = self._series.get(name)
        return series.values[-1] if series else None

    def max(self, name: str) -> float | None:
        series = self._series.get(name)
        return max(series.values) if series else None

    @property
    def last_step(self) -> int:
        return self._axes["step"][-1] if self.num_rows else 0

    def read(self, name: str, axis: str) -> dict[str, list[float]]:
        """Return {"x", "y"} of a metric; empty if it was never logged.

        axis   step; sample: samples trained on so far; time: seconds since the first row
        """
        if axis not in AXES:
            raise ValueError(f"x={axis}: one of {', '.join(AXES)}")
        series = self._series.get(name)
        if series is None:
            return {"x": [], "y": []}
        x_of = self._axes[axis]
        points = [
            (float(x_of[row]), value)
            for row, value in zip(series.rows, series.values, strict=True)
            if x_of[row] == x_of[row]
        ]
        thin = thin_points(points, MOST_POINTS)
        return {"x": [x for x, _ in thin], "y": [y for _, y in thin]}

    def table(self, names: Sequence[str]) -> list[dict[str, float]]:
        """Return for each row that has one of `names` its step, time and those numbers."""
        rows: dict[int, dict[str, float]] = {}
        for name in names:
            if series := self._series.get(name):
                for number, value in zip(series.rows, series.values, strict=True):
                    own = rows.setdefault(number, {"step": float(self._axes["step"][number])})
                    own[name] = value
        for number, row in rows.items():
            row["timestamp"] = self._axes["time"][number] + (self._start_s or 0.0)
        return [rows[number] for number in sorted(rows)]


def thin_points(points: Sequence[tuple[float, float]], most: int) -> Sequence[tuple[float, float]]:
    """Return `most` points at most, each the mean of equally many neighbors."""
    stride = -(-len(points) // most)
    if stride <= 1:
        return points
    groups = [points[start : start + stride] for start in range(0, len(points), stride)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]
