"""Runs programs of other languages than Python on tests of standard input or of a function.

C, C++, Rust:  source + first test --> sandbox: compile, run --> its end, the executable
               executable + further tests --> sandbox: driver --> their ends
Go:            the same, but the executable runs in a sandbox of its own for each further test
others:        source + test --> sandbox, for each test
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.process.errors import make_encodable
from mcore_rl.rewards.code.calls import (
    ARGUMENTS,
    RESULT,
    arguments_file,
    packed_result,
    with_call,
)
from mcore_rl.rewards.code.driver import ERROR_LEN
from mcore_rl.rewards.code.execution import (
    CaseRun,
    CaseSettings,
    command_case,
    run_cases,
)
from mcore_rl.rewards.code.languages import Program
from mcore_rl.rewards.code.places import execute
from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.languages import EXECUTABLE
from mcore_rl.services.sandbox.limits import RunVerdict

_COMPILED_ONCE = ("c", "cpp", "rust")
"""The driver runs what is compiled; others need files beside an executable."""
_KEPT = ("go",)
"""The executable needs more addresses and threads than the driver's limits allow."""
_SETUP = "setup.sql"


def run_other(
    program: Program, tests: Sequence[Mapping[str, Any]], settings: CaseSettings | None = None
) -> list[CaseRun]:
    """Return how each test ended, in order.

    The standard input of a test in SQL is a script that makes the tables. A program that does not
    compile fails all. Raises SandboxError if there is no sandbox, and ValueError if its machine
    lacks the language.
    """
    settings = settings or CaseSettings()
    deadline = time.monotonic() + settings.total_s + settings.compile_s
    first, result = _run(program, tests[0], settings)
    if result.ran is None:
        return [first] * len(tests)
    runs = [first]
    binary = result.files.get(EXECUTABLE)
    if program.language in _COMPILED_ONCE and len(tests) > 1:
        if binary is None:
            gone = CaseRun(1, killed=f"no executable is left: {result.message or 'it is gone'}")
            return [first, *[gone] * (len(tests) - 1)]
        further = [command_case(EXECUTABLE, test["stdin"]) for test in tests[1:]]
        return runs + run_cases([""], further, settings, {EXECUTABLE: binary})
    for test in tests[1:]:
        if time.monotonic() > deadline:
            late = CaseRun(1, killed=f"no time is left of {settings.total_s:g} s for all tests")
            return runs + [late] * (len(tests) - len(runs))
        run, result = _run(program, test, settings, binary)
        if result.ran is None and binary is not None:  # a server that compiles whatever it gets
            binary = None
            run, _ = _run(program, test, settings)
        runs.append(run)
    return runs


def _run(
    program: Program,
    test: Mapping[str, Any],
    settings: CaseSettings,
    binary: bytes | None = None,
) -> tuple[CaseRun, CodeResult]:
    """Run once, compiled before if `binary` is None; try again what SIGKILL ended, as run_cases."""
    request = _request(program, test, settings, binary)
    result = execute(request, settings.sandbox_url)
    run = _end_of(result)
    if run.is_doubtful:
        result = execute(request, settings.sandbox_url)
        run = _end_of(result)
    return run, result


def _request(
    program: Program, test: Mapping[str, Any], settings: CaseSettings, binary: bytes | None
) -> CodeRequest:
    source = program.source
    files: dict[str, bytes] = {}
    fetch: list[str] = []
    if "function" in test:
        source = with_call(source, program.language, test["function"])
        files[ARGUMENTS] = arguments_file(test["arguments"])
        fetch.append(RESULT)
    elif program.language == "sql":
        # A last statement without its semicolon would go on in the program.
        files[_SETUP] = make_encodable(f"{test['stdin']}\n;\n").encode()
        source = f".read {_SETUP}\n{source}"
    if binary is not None:
        source = ""
        files[EXECUTABLE] = binary
    elif program.language in (*_COMPILED_ONCE, *_KEPT):
        fetch.append(EXECUTABLE)
    return CodeRequest(
        source,
        program.language,
        test.get("stdin", ""),
        settings.compile_s,
        files,
        tuple(fetch),
        settings.limits(),
    )


def _end_of(result: CodeResult) -> CaseRun:
    record = result.ran or result.compiled
    assert record is not None, "a result without a record is an error"
    killed = record.killed
    if not killed and record.verdict not in (RunVerdict.OK, RunVerdict.WRONG):
        killed = record.verdict.value
    out, error = (text.decode(errors="replace") for text in (record.stdout, record.stderr))
    found = packed_result(result.files.get(RESULT))
    return CaseRun(record.status, out, error[-ERROR_LEN:], killed, found)
