"""Runs programs on tests, each test in a process of its own inside a sandbox.

A sandbox that fails raises SandboxError. How a program ended is an answer, whatever it did.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mcore_rl.rewards.code_driver import READY
from mcore_rl.sandbox.run import Limits, Outcome, SandboxError, run_program

Execute = Callable[[str, str, Limits], Outcome]
"""(Python program, standard input, limits) -> how it ended; raises SandboxError if it cannot."""
execute: Execute = run_program
"""The one way in which code reaches a sandbox from here."""
_IMPORT = "from mcore_rl.rewards.code_values import pack, unpack\n"
_START_S = 20.0
"""For the sandbox and its Python to start, on a machine that is busy."""


@dataclass(frozen=True)
class CaseLimits:
    """Limits of each test of a program; total_s bounds the time of all of them."""

    wall_s: float = 6.0
    cpu_s: int = 5
    total_s: float = 60.0
    memory_mib: int = 1024
    processes: int = 12
    files_mib: int = 16
    output_kib: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"limit {name} of a test is {value}: it must be greater than 0")


@dataclass(frozen=True)
class CaseRun:
    """How a program ended on a test.

    status   exit status, or 128 + signal
    killed   the limit that ended it, or empty
    result   packed value that its function returned, as JSON; empty if it returned none
    """

    status: int
    out: str = ""
    error: str = ""
    killed: str = ""
    result: str = ""

    @property
    def is_clean(self) -> bool:
        return not self.killed and self.status == 0


def script_case(stdin: str, program: int = 0) -> dict[str, Any]:
    """Return the test that runs a program with a standard input."""
    return {"program": program, "stdin": stdin}


def call_case(function: str, packed_arguments: Any, program: int = 0) -> dict[str, Any]:
    """Return the test that calls a function of a program. `packed_arguments`: a packed list."""
    return {"program": program, "function": function, "arguments": packed_arguments}


def run_cases(
    programs: Sequence[str], tests: Sequence[Mapping[str, Any]], limits: CaseLimits | None = None
) -> list[CaseRun]:
    """Return how each test ended, in order. All run in one sandbox, one after the other.

    Programs that do not trust one another belong into different calls. Tests for which there is no
    time left, or whose driver the program ended, count as killed. Raises SandboxError if no test
    could begin, or if the sandbox refused one what it needs.
    """
    limits = limits or CaseLimits()
    setup = {
        "programs": list(programs),
        "test_s": limits.wall_s,
        "cap_bytes": limits.output_kib << 10,
    }
    outcome = execute(driver_text(), "".join(map(_frame, [setup, *tests])), _sandbox(limits, tests))
    first, *lines = outcome.stdout.split("\n")
    if first != READY:
        raise SandboxError(
            f"the sandbox ended before a program began: status {outcome.status},"
            f" {outcome.killed or 'not killed'}, {outcome.stderr[-500:]!r}"
        )
    refusals = [reason for line in lines[: len(tests)] if (reason := _refusal_in(line))]
    if refusals:
        raise SandboxError(f"the sandbox gave a test no place to run: {refusals[0]}")
    lost = CaseRun(outcome.status, killed=outcome.killed or "the program ended its supervisor")
    runs = [_read(line) or lost for line in lines[: len(tests)]]
    return runs + [lost] * (len(tests) - len(runs))


@cache
def driver_text() -> str:
    """Return the program of the sandbox: values and driver, in one file."""
    folder = Path(__file__).parent
    driver = (folder / "code_driver.py").read_text()
    assert _IMPORT in driver, f"the driver does not begin with {_IMPORT!r}"
    return (folder / "code_values.py").read_text() + driver.replace(_IMPORT, "")


def _frame(content: Any) -> str:
    text = json.dumps(content)
    return f"{len(text):08x}{text}"


def _sandbox(limits: CaseLimits, tests: Sequence[Mapping[str, Any]]) -> Limits:
    return Limits(
        wall_s=_START_S + min(limits.wall_s * len(tests), limits.total_s),
        cpu_s=limits.cpu_s,
        memory_mib=limits.memory_mib,
        processes=limits.processes,
        files_mib=limits.files_mib,
        output_kib=6 * limits.output_kib * (len(tests) + 1),  # JSON writes \u0000 for one byte
    )


def _refusal_in(line: str) -> str:
    """Return why the driver could not begin a test; empty for any other line."""
    try:
        report = json.loads(line)
    except (ValueError, RecursionError):
        return ""
    return str(report.get("refused", "")) if isinstance(report, dict) else ""


def _read(line: str) -> CaseRun | None:
    """Return the report of a test; None for a line that the driver did not write whole."""
    try:
        return CaseRun(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
