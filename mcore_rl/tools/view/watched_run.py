"""Answers what the page asks of one run, a method for each view, from the files of its folder."""

import json
import re
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.logs.rows import has_rows
from mcore_rl.process.safe_path import safe_module
from mcore_rl.tools.view.configurations import read_options
from mcore_rl.tools.view.followed import FollowedRows
from mcore_rl.tools.view.log_lines import (
    START_UP,
    LoggedLoad,
    Phase,
    find_phases,
    read_loads,
    read_records,
)
from mcore_rl.tools.view.metric_table import MetricTable
from mcore_rl.tools.view.sample_index import Filter, Row, SampleIndex, parse_row

MOST_ROWS = 200
"""Rows of the table of samples in an answer."""
PREVIEW_CHARS = 240
SHOWN_STEPS = 40
"""Steps of a timeline, at most."""
PLAN_S = 120
"""Seconds that `mcore-rl plan` may take."""
_IMAGE = re.compile(r"images/[0-9a-f]{16}\.png")
_BAD_IF_ABOVE_0 = {
    "sync/engines_failed": "engines without the weights",
    "reward/errors": "rewards failed",
    "rollout/lost": "samples lost with their collector, sampled again",
    "batch/lost": "samples lost after they were scored",
    "staleness/dropped": "samples dropped as too stale",
    "train/skipped_share": "share of optimizer steps skipped",
}
"""Metric -> what its value counts."""


class WatchedRun:
    """A run folder; `refresh` takes over what was written since."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.metrics = MetricTable(path)
        self.samples = SampleIndex(path)
        self._episodes = FollowedRows(path / "episodes.jsonl")
        self._ends: Counter[str] = Counter()
        self._is_indexed = False
        self._plan: dict[str, Any] | None = None
        self._plan_lock = threading.Lock()
        self._lock = threading.Lock()

    def refresh(self) -> bool:
        """Read a block of each file; return whether there was nothing more."""
        is_end = True
        for read in (self.metrics.refresh, self.samples.refresh, self._count_ends):
            with self._lock:
                is_end = read() and is_end
        self._is_indexed = is_end
        return is_end

    def _count_ends(self) -> bool:
        new = self._episodes.read_new()
        if new.is_restart:
            self._ends = Counter()
        for _, line in new.lines:
            row = parse_row(line) or {}
            self._ends.update(row.get("ends", ()))
        return new.is_end

    def describe(self) -> dict[str, Any]:
        """Return what the page's head shows; a change of the counts means that there is more."""
        with self._lock:
            samples = self.samples
            return {
                "name": self.name,
                "path": str(self.path),
                "metrics": self.metrics.names(),
                "num_metric_rows": self.metrics.num_rows,
                "num_samples": samples.num_rows,
                "last_step": self.metrics.last_step,
                "steps": int(read_options(self.path).get("run.steps", "0") or 0),
                "splits": samples.names("split"),
                "reasons": samples.names("reason"),
                "length_unit": "tokens" if samples.counts_tokens else "characters",
                "is_indexed": self._is_indexed,
            }

    def read_series(self, names: Sequence[str], axis: str) -> dict[str, Any]:
        with self._lock:
            return {name: self.metrics.read(name, axis) for name in names}

    def list_samples(self, wanted: Filter, sort: str, first: int, number: int) -> dict[str, Any]:
        """Return rows `first`, ... of those that fit, shortened, and how many fit."""
        with self._lock:
            found = self.samples.find(wanted)
            rows = self.samples.sort(found.rows, sort)
            chosen = rows[first : first + min(number, MOST_ROWS)]
            rewards = self.samples.columns["reward"][rows]
            is_known = ~np.isnan(rewards)
            return {
                "total": len(rows),
                "mean_reward": float(rewards[is_known].mean()) if is_known.any() else None,
                "num_rows": self.samples.num_rows,
                "num_searched": found.num_searched,
                "rows": [self._preview(int(row)) for row in chosen],
            }

    def _preview(self, number: int) -> dict[str, Any]:
        try:
            row = self.samples.read(number)
        except LookupError:
            return {"number": number, "prompt": "", "response": "(cut since)"}
        place = self.samples.columns[number]
        kept = ("step", "split", "prompt_index", "reward", "finish_reason", "reward_error")
        return {
            "number": number,
            **{name: row[name] for name in kept if name in row},
            "length": int(place["length"]),
            "turns": int(place["turns"]),
            "has_tokens": bool(place["tokens"]),
            "prompt": str(row.get("prompt", ""))[-PREVIEW_CHARS:],
            "response": str(row.get("response", ""))[:PREVIEW_CHARS],
        }

    def read_sample(self, number: int) -> dict[str, Any]:
        """Return a whole row. Raises LookupError if there is none of that number."""
        with self._lock:
            return {"number": number, **self.samples.read(number)}

    def list_groups(self, step: int, split: str) -> dict[str, Any]:
        """Return the logged samples of a step by prompt, with rewards, their parts and advantages.

        relative   reward minus the mean of the group's logged samples, by their deviation
        """
        with self._lock:
            numbers = self.samples.find(
                Filter(split=split, first_step=step, last_step=step)
            ).rows.tolist()
            rows = [(number, self.samples.read(number)) for number in numbers]
        groups: dict[int, list[tuple[int, Row]]] = {}
        for number, row in rows:
            groups.setdefault(row.get("prompt_index", -1), []).append((number, row))
        return {"groups": [_sum_up_group(index, own) for index, own in groups.items()]}

    def read_timeline(self, first_step: int | None, last_step: int | None) -> dict[str, Any]:
        """Return phases and engines' loads of some steps, the last ones unless others are named."""
        phases = find_phases(read_records(self.path))
        last = last_step if last_step is not None else max((p.step for p in phases), default=0)
        first = first_step if first_step is not None else max(0, last - 9)
        first = max(first, last - SHOWN_STEPS + 1)
        shown = [phase for phase in phases if first <= phase.step <= last]
        start_s = shown[0].start_s if shown else 0.0
        end_s = shown[-1].end_s if shown else 0.0
        loads = {
            engine: [load for load in own if start_s - 1 <= load.time_s <= end_s]
            for engine, own in read_loads(self.path).items()
        }
        return {
            "first_step": first,
            "last_step": last,
            "phases": [asdict(phase) for phase in shown],
            "engines": {engine: [asdict(load) for load in own] for engine, own in loads.items()},
        }

    def trace(self) -> dict[str, Any]:
        """Return phases and loads of the logs' ends, for Perfetto."""
        return make_trace(self.name, find_phases(read_records(self.path)), read_loads(self.path))

    def list_faults(self) -> dict[str, Any]:
        """Return warnings, errors and starts of the controller, and steps that count faults."""
        records = read_records(self.path)
        told = [
            {"time_s": record.time_s, "level": record.level, "text": record.text}
            for record in records
            if record.level in ("WARNING", "ERROR", "CRITICAL") or record.text == START_UP
        ]
        with self._lock:
            table = self.metrics.table(list(_BAD_IF_ABOVE_0))
            ends = dict(self._ends.most_common())
            num_bad = self.metrics.num_bad + self.samples.num_bad
        counted = [
            {"step": row["step"], "metric": name, "value": row[name], "text": text}
            for row in table
            for name, text in _BAD_IF_ABOVE_0.items()
            if row.get(name, 0.0) > 0.0
        ]
        return {"records": told[-500:], "steps": counted[-500:], "ends": ends, "num_bad": num_bad}

    def plan_memory(self) -> dict[str, Any]:
        """Return what `mcore-rl plan` says of the run's recipe, and the most memory in use so far.

        The plan is made once; `error` says why it could not be.
        """
        with self._plan_lock:
            if self._plan is None:
                self._plan = _plan(self.path / "config.yaml")
            plan = self._plan
        with self._lock:
            peak = self.metrics.max("train/peak_memory_gib_max")
        return {**plan, "peak_gib": peak}

    def find_image(self, path: str) -> Path | None:
        """Return the file of a small copy of an image, None if there is none of that name."""
        file = self.path / path
        return file if _IMAGE.fullmatch(path) and file.is_file() else None


def _sum_up_group(index: int, rows: Sequence[tuple[int, Row]]) -> dict[str, Any]:
    rewards = [row.get("reward") for _, row in rows]
    known = np.array([reward for reward in rewards if reward is not None], float)
    mean, deviation = (known.mean(), known.std()) if len(known) else (0.0, 0.0)
    samples = [
        {
            "number": number,
            "reward": row.get("reward"),
            "relative": _relate(row.get("reward"), mean, deviation),
            "advantage": row.get("advantage"),
            "parts": row.get("parts", {}),
            "finish_reason": row.get("finish_reason"),
            "response": str(row.get("response", ""))[:PREVIEW_CHARS],
        }
        for number, row in rows
    ]
    return {
        "prompt_index": index,
        "prompt": str(rows[0][1].get("prompt", ""))[-PREVIEW_CHARS:],
        "mean": float(mean),
        "std": float(deviation),
        "samples": samples,
    }


def _relate(reward: float | None, mean: float, deviation: float) -> float | None:
    if reward is None:
        return None
    return float((reward - mean) / deviation) if deviation else 0.0


def _plan(config: Path) -> dict[str, Any]:
    """Return {"plan"} or {"error"}; config.yaml becomes a recipe in a folder of a moment."""
    if not config.exists():
        return {"error": f"{config}: no such file"}
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "planned.yaml")
        recipe.write_text(f"defaults: [schema, _self_]\n{config.read_text()}")
        command = [*safe_module("mcore_rl.cli"), "plan", "--json", f"recipe={recipe}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PLAN_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"`mcore-rl plan` of {config} took more than {PLAN_S} s"}
    try:
        return {"plan": json.loads(done.stdout)}
    except ValueError:
        said = done.stderr.strip().splitlines() or [f"plan ended with {done.returncode}"]
        return {"error": said[-1]}


def make_trace(
    name: str, phases: Sequence[Phase], loads: Mapping[str, Sequence[LoggedLoad]]
) -> dict[str, Any]:
    """Return the trace event format: a slice for each phase, counters for each engine.

    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": name}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "controller"}},
    ]
    for phase in phases:
        events.append(
            {
                "ph": "X",
                "name": phase.name,
                "cat": "phase",
                "pid": 1,
                "tid": 1,
                "ts": round(phase.start_s * 1e6),
                "dur": round((phase.end_s - phase.start_s) * 1e6),
                "args": {"step": phase.step},
            }
        )
    for engine, own in loads.items():
        for load in own:
            counters: dict[str, dict[str, float]] = {
                "requests": {"running": load.running, "queued": load.queued},
                "KV cache": {"share": load.kv_share},
            }
            for counter, values in counters.items():
                events.append(
                    {
                        "ph": "C",
                        "name": f"{engine}: {counter}",
                        "pid": 1,
                        "ts": round(load.time_s * 1e6),
                        "args": values,
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def make_filter(query: Mapping[str, str]) -> Filter:
    """Return the filter that a query names. Raises ValueError for a bound that is no number."""
    values: dict[str, Any] = {}
    for field in fields(Filter):
        text = query.get(field.name, "")
        if not text:
            continue
        if field.type is str or field.type == "str":
            values[field.name] = text
        elif field.type is bool or field.type == "bool":
            values[field.name] = text in ("1", "true")
        else:
            values[field.name] = read_number(field.name, text)
    return Filter(**values)


def read_number(name: str, text: str) -> float:
    """Return the number of a query's value. Raises ValueError naming it otherwise."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text}: not a number") from None


def open_runs(paths: Sequence[Path]) -> list[WatchedRun]:
    """Return the runs in these folders, each with a name of its own.

    Raises ValueError if a folder has none of a run's files; the error names runs below it.
    """
    names = [path.resolve().name for path in paths]
    runs = []
    for path, name in zip(paths, names, strict=True):
        if not _is_run(path):
            below = sorted(str(each) for each in path.glob("*") if _is_run(each))
            remedy = f"give {' '.join(below[:8])}" if below else "give the run.dir of a run"
            raise ValueError(f"{path}: no config.yaml or metrics.jsonl of a run there; {remedy}")
        full = str(path.resolve())
        runs.append(WatchedRun(path.resolve(), name if names.count(name) == 1 else full))
    return runs


def _is_run(path: Path) -> bool:
    return has_rows(path / "metrics.jsonl") or (path / "config.yaml").is_file()
