"""Runs each check in a process of its own; prints a JSON line per check and a summary."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mcore_rl.device import describe_device, has_cuda
from mcore_rl.doctor.check import Check, Result, Stage

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
LAST_CHARS = 2000
"""Characters of a failed check's output that its line shows."""


def run_stages(stages: Sequence[Stage], log_dir: Path) -> bool:
    """Run all checks, print their lines and the summary; return whether none failed.

    Each check's output goes to a file in `log_dir`.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    results = []
    for stage in stages:
        for check in stage.checks:
            results.append(run_check(stage, check, log_dir))
            print(json.dumps(asdict(results[-1])), flush=True)
    print(json.dumps(summarize(results)), flush=True)
    return all(result.outcome != "failed" for result in results)


def summarize(results: Sequence[Result]) -> dict[str, Any]:
    counts: dict[str, int] = dict.fromkeys(("ok", "failed", "skipped"), 0)
    for result in results:
        counts[result.outcome] += 1
    seconds = round(sum(result.seconds for result in results), 1)
    return {
        "summary": counts,
        "failed": [f"{r.stage}: {r.check}" for r in results if r.outcome == "failed"],
        "seconds": seconds,
        "date": date.today().isoformat(),
        **describe_device(),
    }


def run_check(stage: Stage, check: Check, log_dir: Path) -> Result:
    """Run one check, or say why it is skipped."""
    missing = [name for name in check.modules if find_spec(name.split(".")[0]) is None]
    if check.gpu and not has_cuda():
        return Result(stage.name, check.name, "skipped", 0.0, "there is no GPU")
    if missing:
        return Result(stage.name, check.name, "skipped", 0.0, f"{missing[0]} is not installed")
    began_s = time.monotonic()
    log = log_dir / f"{stage.name}_{check.name.replace(' ', '_')}.log"
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        answer = Path(folder) / "outcome.json"
        status = _run_child([stage.name, check.name, str(answer)], check.deadline_s, log)
        told = json.loads(answer.read_text()) if answer.exists() else {}
    seconds = round(time.monotonic() - began_s, 1)
    if told:
        return Result(stage.name, check.name, seconds=seconds, **told)
    why = f"{status}; its last output: {log.read_text(errors='replace')[-LAST_CHARS:]}"
    return Result(stage.name, check.name, "failed", seconds, why)


def _run_child(arguments: Sequence[str], deadline_s: float, log: Path) -> str:
    """Run the child until its deadline; return how it ended. Whatever it started is killed."""
    command = [sys.executable, "-m", "mcore_rl.doctor.child", *arguments]
    with log.open("wb") as out:
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )
    with _killing_session(child):
        try:
            return f"ended with status {child.wait(deadline_s)}"
        except subprocess.TimeoutExpired:
            return f"not done after {deadline_s:g} s"


@contextmanager
def _killing_session(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Kill what is left of the child's session on the way out, also after Ctrl-C."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _environment() -> Mapping[str, str]:
    """Children find this package, and what was added to the path, wherever they start."""
    paths = [str(PACKAGE_ROOT), *(path for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
