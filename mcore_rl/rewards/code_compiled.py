"""Runs programs of other languages than Python on tests of standard input.

C, C++, Rust:  source + first test --> sandbox: compile, run --> its end, the executable
               executable + further tests --> sandbox: driver --> their ends
others:        source + test --> sandbox, for each test
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.rewards.code_driver import ERROR_LEN
from mcore_rl.rewards.code_execution import (
    CaseRun,
    CaseSettings,
    command_case,
    run_cases,
)
from mcore_rl.rewards.code_languages import Program
from mcore_rl.rewards.code_places import execute
from mcore_rl.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.sandbox.limits import RunVerdict

EXECUTABLE = "program"
"""The file that the compilers of the sandbox write."""
_COMPILED_ONCE = ("c", "cpp", "rust")
"""Others need files beside an executable, or more addresses than the driver's limits allow."""


def run_other(
    program: Program, tests: Sequence[Mapping[str, Any]], settings: CaseSettings | None = None
) -> list[CaseRun]:
    """Return how each test of standard input ended, in order.

    A program that does not compile fails all. Raises SandboxError if there is no sandbox, and
    ValueError if its machine lacks the language.
    """
    settings = settings or CaseSettings()
    deadline = time.monotonic() + settings.total_s + settings.compile_s
    first, result = _run(program, tests[0]["stdin"], settings)
    if result.ran is None:
        return [first] * len(tests)
    runs = [first]
    if program.language in _COMPILED_ONCE and len(tests) > 1:
        binary = result.files.get(EXECUTABLE)
        if binary is None:
            gone = CaseRun(1, killed=f"no executable is left: {result.message or 'it is gone'}")
            return [first, *[gone] * (len(tests) - 1)]
        further = [command_case(EXECUTABLE, test["stdin"]) for test in tests[1:]]
        return runs + run_cases([""], further, settings, {EXECUTABLE: binary})
    for test in tests[1:]:
        if time.monotonic() > deadline:
            late = CaseRun(1, killed=f"no time is left of {settings.total_s:g} s for all tests")
            return runs + [late] * (len(tests) - len(runs))
        runs.append(_run(program, test["stdin"], settings)[0])
    return runs


def _run(program: Program, stdin: str, settings: CaseSettings) -> tuple[CaseRun, CodeResult]:
    """Compile and run once; what SIGKILL ended is tried once more, as in run_cases."""
    fetch = (EXECUTABLE,) if program.language in _COMPILED_ONCE else ()
    request = CodeRequest(
        program.source,
        program.language,
        stdin,
        settings.compile_s,
        fetch=fetch,
        limits=settings.limits(),
    )
    result = execute(request, settings.sandbox_url)
    run = _end_of(result)
    if run.is_doubtful:
        result = execute(request, settings.sandbox_url)
        run = _end_of(result)
    return run, result


def _end_of(result: CodeResult) -> CaseRun:
    record = result.ran or result.compiled
    assert record is not None, "a result without a record is an error"
    killed = record.killed
    if not killed and record.verdict not in (RunVerdict.OK, RunVerdict.WRONG):
        killed = record.verdict.value
    out, error = (text.decode(errors="replace") for text in (record.stdout, record.stderr))
    return CaseRun(record.status, out, error[-ERROR_LEN:], killed)
