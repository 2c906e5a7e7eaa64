"""Runs the doctor's stages, each check in a process of its own; prints a JSON line per check and a
summary.

    python -m mcore_rl.tools.doctor.runner <stage> <check>      the process of one check

A check may crash its process, or leave a GPU's context broken, without harm to the next. Its
outcome goes to the file OUTCOME in the check's folder.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mcore_rl
from mcore_rl.device import describe_device, has_cuda
from mcore_rl.process.process_state import wait_killed
from mcore_rl.process.safe_path import safe_module
from mcore_rl.tools.doctor.check import (
    FOLDER,
    Check,
    Figures,
    MissedTargetError,
    Result,
    SkipCheckError,
    Stage,
    find_own_folder,
    make_empty,
    make_full_name,
    remove_large_files,
)
from mcore_rl.tools.doctor.megatron_checks import MEGATRON, PROBES
from mcore_rl.tools.doctor.run_checks import RUN
from mcore_rl.tools.doctor.step_checks import STEP
from mcore_rl.tools.doctor.sync_checks import SYNC
from mcore_rl.tools.doctor.te_checks import TE

STAGES: tuple[Stage, ...] = (SYNC, PROBES, MEGATRON, TE, STEP, RUN)
"""All stages, in the order in which they run."""
_NAME_WIDTH = max(len(make_full_name(stage, check)) for stage in STAGES for check in stage.checks)
OUTCOME = "outcome.json"
PACKAGE_ROOT = Path(mcore_rl.__file__).resolve().parents[1]
LAST_CHARS = 2000
"""Characters of a failed check's output that its line shows."""


def choose_stages(stages: str, checks: str = "") -> tuple[Stage, ...]:
    """Return the listed stages, or the stages of listed checks with these checks alone.

    checks   each as <stage>:<check>, with spaces or underscores in the latter's name

    All stages are chosen if both lists are empty; the order is always that of STAGES. Raises
    ValueError naming a stage or check that there is not, or if both are given.
    """
    if stages and checks:
        raise ValueError(f"--stages={stages} and --checks={checks}: choose by one of them")
    if checks:
        return _choose_checks(checks)
    chosen = _split(stages)
    known = [stage.name for stage in STAGES]
    for name in chosen:
        if name not in known:
            raise ValueError(f"--stages={stages}: no stage {name!r}; there are {', '.join(known)}")
    return tuple(stage for stage in STAGES if stage.name in (chosen or known))


def _choose_checks(checks: str) -> tuple[Stage, ...]:
    chosen = [name.replace("_", " ") for name in _split(checks)]
    known = [make_full_name(stage, check) for stage in STAGES for check in stage.checks]
    for name in chosen:
        if name not in known:
            raise ValueError(f"--checks={checks}: no check {name!r}; there are {', '.join(known)}")
    parts = [
        replace(stage, checks=tuple(c for c in stage.checks if make_full_name(stage, c) in chosen))
        for stage in STAGES
    ]
    return tuple(stage for stage in parts if stage.checks)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def describe_checks(stages: Sequence[Stage]) -> str:
    """Return a line for each check: its name, the seconds that it may take, and what it shows."""
    lines = []
    total_s = 0.0
    for stage in stages:
        for check in stage.checks:
            text = (check.run.__doc__ or "").strip().splitlines()[0]
            needs = "  (needs a GPU)" if check.gpu else ""
            name = make_full_name(stage, check)
            lines.append(f"{name:{_NAME_WIDTH}} {check.deadline_s:4.0f} s  {text}{needs}")
            total_s += check.deadline_s
    return "\n".join([*lines, f"{len(lines)} checks, at most {total_s:.0f} s"])


def run_stages(stages: Sequence[Stage], log_dir: Path, seconds: float | None = None) -> bool:
    """Run all checks, print their lines and the summary; return whether none failed.

    Each check's output goes to a file in `log_dir`, and its own files to a folder there. A check
    that may take longer than what is left of `seconds` is skipped, and the summary names it. Raises
    ValueError if none of them fits.
    """
    began_s = time.monotonic()
    _refuse_too_few(stages, seconds)
    log_dir.mkdir(parents=True, exist_ok=True)
    results = []
    left_out = []
    for stage in stages:
        for check in stage.checks:
            result = _skip(stage, check)
            if result is None and seconds is not None:
                left_s = seconds - (time.monotonic() - began_s)
                if check.deadline_s > left_s:
                    left_out.append(make_full_name(stage, check))
                    result = _skip_for_time(stage, check, seconds, left_s)
            results.append(result or run_check(stage, check, log_dir))
            print(json.dumps(asdict(results[-1])), flush=True)
    print(json.dumps(summarize(results, left_out)), flush=True)
    return all(result.outcome != "failed" for result in results)


def _refuse_too_few(stages: Sequence[Stage], seconds: float | None) -> None:
    chosen = [(check.deadline_s, make_full_name(s, check)) for s in stages for check in s.checks]
    least_s, name = min(chosen)
    if seconds is not None and least_s > seconds:
        raise ValueError(
            f"--seconds={seconds:g}: no check fits; {name} may take {least_s:g} s, others no less"
        )


def summarize(results: Sequence[Result], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the summary; `left_out` are the full names of checks for which there was no time."""
    counts: dict[str, int] = dict.fromkeys(("ok", "failed", "skipped"), 0)
    for result in results:
        counts[result.outcome] += 1
    seconds = round(sum(result.seconds for result in results), 1)
    return {
        "summary": counts,
        "failed": [f"{r.stage}: {r.check}" for r in results if r.outcome == "failed"],
        "left_out": ",".join(left_out),
        "seconds": seconds,
        "date": date.today().isoformat(),
        **describe_device(),
    }


def _skip(stage: Stage, check: Check) -> Result | None:
    """Return the line of a check for which the machine lacks something, or None."""
    missing = [name for name in check.modules if find_spec(name.split(".")[0]) is None]
    if check.gpu and not has_cuda():
        return Result(stage.name, check.name, "skipped", 0.0, "there is no GPU")
    if missing:
        return Result(stage.name, check.name, "skipped", 0.0, f"{missing[0]} is not installed")
    return None


def _skip_for_time(stage: Stage, check: Check, seconds: float, left_s: float) -> Result:
    why = f"may take {check.deadline_s:g} s, and {left_s:.0f} of --seconds={seconds:g} are left"
    return Result(stage.name, check.name, "skipped", 0.0, why)


def run_check(stage: Stage, check: Check, log_dir: Path) -> Result:
    """Run one check, or say what the machine lacks for it."""
    skipped = _skip(stage, check)
    if skipped is not None:
        return skipped
    began_s = time.monotonic()
    folder = (log_dir / f"{stage.name}_{check.name.replace(' ', '_')}").resolve()
    log = folder.with_name(f"{folder.name}.log")
    make_empty(folder)
    try:
        status = _run_child([stage.name, check.name], folder, check.deadline_s, log)
    finally:
        removed = remove_large_files(folder)
    seconds = round(time.monotonic() - began_s, 1)
    answer = folder / OUTCOME
    if answer.exists():
        told = json.loads(answer.read_text())
        return Result(stage.name, check.name, seconds=seconds, **told)
    output = log.read_text(errors="replace")[-LAST_CHARS:]
    left_out = f" without {', '.join(removed)}" if removed else ""
    why = f"{status}; its files are in {folder}{left_out}; its last output: {output}"
    return Result(stage.name, check.name, "failed", seconds, why)


def _run_child(arguments: Sequence[str], folder: Path, deadline_s: float, log: Path) -> str:
    """Run the child until its deadline; return how it ended. Whatever it started is killed."""
    command = [*safe_module("mcore_rl.tools.doctor.runner"), *arguments]
    with log.open("wb") as out:
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**_make_environment(), FOLDER: str(folder)},
            start_new_session=True,
        )
    with _kill_session(child):
        try:
            return f"ended with status {child.wait(deadline_s)}"
        except subprocess.TimeoutExpired:
            return f"not done after {deadline_s:g} s"


@contextmanager
def _kill_session(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Kill what is left of the child's session on the way out, also after Ctrl-C."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        wait_killed(child, "the process of a check")


def _make_environment() -> Mapping[str, str]:
    """Children find this package, and what was added to the path, wherever they start."""
    paths = [str(PACKAGE_ROOT), *(path for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def main() -> None:
    stage, name = sys.argv[1:]
    outcome, why, figures = run(find_check(stage, name))
    told = json.dumps({"outcome": outcome, "why": why, "figures": figures})
    (find_own_folder() / OUTCOME).write_text(told)


def run(check: Check) -> tuple[str, str, Figures]:
    """Return outcome, reason and figures. Any other exception passes through as a failure."""
    try:
        return "ok", "", check.run()
    except SkipCheckError as reason:
        return "skipped", str(reason), {}
    except MissedTargetError as missed:
        return "failed", str(missed), missed.figures


def find_check(stage_name: str, check_name: str) -> Check:
    [check] = [
        check
        for stage in STAGES
        for check in stage.checks
        if (stage.name, check.name) == (stage_name, check_name)
    ]
    return check


if __name__ == "__main__":
    main()
