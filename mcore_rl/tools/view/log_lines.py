"""Reads logs of a run: phases and faults of the controller's, batches of the engines'.

controller.log  2026-11-28 17:01:02,089 INFO mcore_rl.logs.logger: step 1: reward
sglang_0.log    [2026-11-28 17:00:59] Prefill batch, ... token usage: 0.03, #running-req: 30, ...

Of each log, the end is read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mcore_rl.process.log_files import find_segments

MOST_BYTES = 4 << 20
"""Bytes of a log that are read, from its end."""
START_UP = "start-up"
"""The first record of each launch."""
_RECORD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (\w+) ([\w.]+): (.*)")
_PHASE = re.compile(r"step (\d+): ([\w ]+)$")
_BATCH = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] (Prefill|Decode) batch")
_USAGE = re.compile(r"token usage: ([\d.]+)")
_RUNNING = re.compile(r"#running-req: (\d+)")
_QUEUED = re.compile(r"#queue-req: (\d+)")


@dataclass(frozen=True)
class LogRecord:
    """A record of the controller's log; `time_s` is seconds since 1970 in this machine's zone."""

    time_s: float
    level: str
    source: str
    text: str


@dataclass(frozen=True)
class Phase:
    """A phase of a step; `end_s` is when the next record says that another began."""

    step: int
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class LoggedLoad:
    """The load of an engine in a second: requests that ran and waited, share of its KV cache."""

    time_s: float
    running: int
    queued: int
    kv_share: float


def read_records(run_dir: Path) -> list[LogRecord]:
    """Return the records at the end of controller.log; further lines of a record join its text."""
    records: list[LogRecord] = []
    for line in _read_end(run_dir / "logs" / "controller.log"):
        match = _RECORD.match(line)
        if match:
            time_s = datetime.fromisoformat(match[1]).timestamp()
            records.append(LogRecord(time_s, match[2], match[3], match[4]))
        elif records:
            last = records[-1]
            records[-1] = LogRecord(last.time_s, last.level, last.source, f"{last.text}\n{line}")
    return records


def find_phases(records: list[LogRecord]) -> list[Phase]:
    """Return the phases in order. The last one of a launch ends with its last record."""
    phases: list[Phase] = []
    before_s = 0.0
    for record in records:
        match = _PHASE.match(record.text) if record.source == "mcore_rl.logs.logger" else None
        is_start_up = record.text == START_UP
        if match or is_start_up:
            if phases:
                _end_last(phases, before_s if is_start_up else record.time_s)
            step, name = (int(match[1]), match[2]) if match else (0, START_UP)
            phases.append(Phase(step, name, record.time_s, record.time_s))
        before_s = record.time_s
    if phases:
        _end_last(phases, before_s)
    return phases


def _end_last(phases: list[Phase], end_s: float) -> None:
    last = phases[-1]
    phases[-1] = Phase(last.step, last.name, last.start_s, max(end_s, last.start_s))


def read_loads(run_dir: Path) -> dict[str, list[LoggedLoad]]:
    """Return by engine what its log says of its load, a value per second: the last one."""
    loads: dict[str, list[LoggedLoad]] = {}
    for path in sorted((run_dir / "logs").glob("sglang_*.log")):
        if re.fullmatch(r"sglang_\d+", path.stem):  # segments have further numbers
            loads[path.stem.replace("sglang_", "engine ")] = list(_read_batches(path))
    return loads


def _read_batches(path: Path) -> Iterator[LoggedLoad]:
    waiting: LoggedLoad | None = None
    stamp = ""
    time_s = 0.0
    for line in _read_end(path):
        match = _BATCH.match(line)
        if not match:
            continue
        if match[1] != stamp:
            if waiting:
                yield waiting
            stamp = match[1]
            time_s = datetime.fromisoformat(stamp).timestamp()
        numbers = [pattern.search(line) for pattern in (_RUNNING, _QUEUED, _USAGE)]
        running, queued, usage = (float(found[1]) if found else 0.0 for found in numbers)
        waiting = LoggedLoad(time_s, int(running), int(queued), usage)
    if waiting:
        yield waiting


def _read_end(path: Path) -> Iterator[str]:
    """Yield the last lines of a log and its segments, MOST_BYTES at most."""
    parts = [*find_segments(path), *([path] if path.exists() else [])]
    chosen: list[tuple[Path, int]] = []
    left = MOST_BYTES
    for part in reversed(parts):
        size = part.stat().st_size
        chosen.append((part, max(0, size - left)))
        left -= size
        if left <= 0:
            break
    for part, start in reversed(chosen):
        with part.open("rb") as file:
            file.seek(start)
            if start:
                file.readline()
            for line in file:
                yield line.decode(errors="replace").rstrip("\n")
