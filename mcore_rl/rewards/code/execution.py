"""Runs programs on tests, each test in a process of its own inside a sandbox.

    Python:        programs + tests --> sandbox: driver --> their ends
    C, C++, Rust:  source + first test --> sandbox: compile, run --> its end, the executable
                   executable + further tests --> sandbox: driver --> their ends
    Go:            the same, but the executable runs in a sandbox of its own for each further test
    others:        source + test --> sandbox, for each test

A sandbox that fails raises SandboxError. How a program ended is an answer, whatever it did.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from mcore_rl.process.errors import make_encodable
from mcore_rl.rewards.code.calls import (
    ARGUMENTS,
    RESULT,
    arguments_file,
    read_packed_result,
    with_call,
)
from mcore_rl.rewards.code.driver import ERROR_LEN, READY
from mcore_rl.rewards.code.languages import Program
from mcore_rl.rewards.code.places import execute
from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.languages import EXECUTABLE
from mcore_rl.services.sandbox.limits import MIB, Limits, RunRecord, RunVerdict, SandboxError

_SIGKILL = 137
ENDED_SUPERVISOR = "the program ended its supervisor"
_STALLS = 2
"""Sandboxes in a row that end without a further test before the program counts as the cause."""
_START_S = 20.0
"""For the sandbox and its Python to start, on a machine that is busy."""
_COMPILED_ONCE = ("c", "cpp", "rust")
"""The driver runs what is compiled; others need files beside an executable."""
_KEPT = ("go",)
"""The executable needs more addresses and threads than the driver's limits allow."""
_SETUP = "setup.sql"


@dataclass(frozen=True)
class CaseSettings:
    """Limits of each test of a program, and where it runs.

    total_s      seconds for all tests of a program
    compile_s    seconds for its compiler
    sandbox_url  a server of SandboxFusion's API, which bounds all but time and memory by its own
                 limits; empty: the run's server, or else the sandbox of this process
    """

    wall_s: float = 6.0
    cpu_s: int = 5
    total_s: float = 60.0
    compile_s: float = 30.0
    memory_mib: int = 1024
    processes: int = 12
    files_mib: int = 16
    output_kib: int = 256
    sandbox_url: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "sandbox_url" and not (math.isfinite(value) and value > 0):
                raise ValueError(f"limit {name} of a test is {value}: it must be greater than 0")

    def limits(self, num_tests: int = 1) -> Limits:
        """Return the limits of a program that has one test, or is the driver of several."""
        return Limits(
            wall_s=min(self.wall_s * num_tests, self.total_s),
            cpu_s=self.cpu_s,
            memory_mib=self.memory_mib,
            processes=self.processes,
            files_mib=self.files_mib,
            output_kib=self.output_kib,
        )


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

    @property
    def is_doubtful(self) -> bool:
        """Return whether SIGKILL ended it without a limit: perhaps something outside sent it."""
        return not self.killed and self.status == _SIGKILL


def script_case(stdin: str, program: int = 0) -> dict[str, Any]:
    """Return the test that runs a program with a standard input."""
    return {"program": program, "stdin": stdin}


def call_case(function: str, packed_arguments: Any, program: int = 0) -> dict[str, Any]:
    """Return the test that calls a function of a program. `packed_arguments`: a packed list."""
    return {"program": program, "function": function, "arguments": packed_arguments}


def command_case(command: str, stdin: str) -> dict[str, Any]:
    """Return the test that executes a file of the sandbox's folder with a standard input."""
    return {"program": 0, "stdin": stdin, "command": command}


def run_cases(
    programs: Sequence[str],
    tests: Sequence[Mapping[str, Any]],
    settings: CaseSettings | None = None,
    files: Mapping[str, bytes] | None = None,
) -> list[CaseRun]:
    """Return how each test ended, in order. All run in one sandbox, one after the other.

    files   of the sandbox's folder, by path, executable

    Programs that do not trust one another belong into different calls. A test counts as killed if
    no time is left for it, or if its program ended the driver. If SIGKILL ended a test, it is tried
    once more, as the signal may have come from outside; the second time the program is to blame.
    Raises SandboxError if no test could begin, or if the sandbox refused one what it needs.
    """
    driver = _Driver(list(programs), settings or CaseSettings(), files or {})
    runs: list[CaseRun] = []
    lost = CaseRun(_SIGKILL)
    num_stalls = 0
    while len(runs) < len(tests) and num_stalls < _STALLS:
        further, record = driver.run(tests[len(runs) :])
        if further is None and num_stalls == _STALLS - 1:
            raise SandboxError(_no_beginning(record))
        runs += further or []
        num_stalls = 0 if further else num_stalls + 1
        lost = CaseRun(record.status, killed=record.killed or ENDED_SUPERVISOR)
        if record.verdict == RunVerdict.TIMEOUT:
            break
    doubtful = [i for i, run in enumerate(runs) if run.is_doubtful]
    if doubtful:
        again, _ = driver.run([tests[i] for i in doubtful])
        for i, run in zip(doubtful, again or [], strict=False):
            runs[i] = run
    return runs + [lost] * (len(tests) - len(runs))


def _no_beginning(record: RunRecord) -> str:
    return (
        f"the sandbox ended before a program began: status {record.status},"
        f" {record.killed or 'not killed'}, {record.stderr[-500:].decode(errors='replace')!r}"
    )


@dataclass(frozen=True)
class _Driver:
    programs: list[str]
    settings: CaseSettings
    files: Mapping[str, bytes] = field(default_factory=dict)

    def run(self, tests: Sequence[Mapping[str, Any]]) -> tuple[list[CaseRun] | None, RunRecord]:
        """Return how the first tests ended, None if none began, and how the driver ended."""
        record = self._execute(tests)
        first, *lines = record.stdout.decode(errors="replace").split("\n")
        if first != READY:
            return None, record
        runs: list[CaseRun] = []
        for line in lines[: len(tests)]:
            if reason := _refusal_in(line):
                raise SandboxError(f"the sandbox gave a test no place to run: {reason}")
            run = _read(line)
            if run is None:
                break
            runs.append(run)
        return runs, record

    def _execute(self, tests: Sequence[Mapping[str, Any]]) -> RunRecord:
        settings = self.settings
        setup = {
            "programs": self.programs,
            "executables": sorted(self.files),
            "test_s": settings.wall_s,
            "cap_bytes": settings.output_kib << 10,
        }
        limits = settings.limits(len(tests))
        limits = replace(
            limits,
            wall_s=_START_S + limits.wall_s,
            files_mib=limits.files_mib + math.ceil(sum(map(len, self.files.values())) / MIB),
            output_kib=6 * limits.output_kib * (len(tests) + 1),  # \u0000 stands for one byte
        )
        stdin = "".join(map(_frame, [setup, *tests]))
        request = CodeRequest(driver_text(), stdin=stdin, files=self.files, limits=limits)
        ran = execute(request, settings.sandbox_url).ran
        assert ran is not None, "a program of Python is not compiled"
        return ran


@cache
def driver_text() -> str:
    """Return the program of the sandbox."""
    return Path(__file__).with_name("driver.py").read_text()


def _frame(content: Any) -> str:
    text = json.dumps(content)
    return f"{len(text):08x}{text}"


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
    found = read_packed_result(result.files.get(RESULT))
    return CaseRun(record.status, out, error[-ERROR_LEN:], killed, found)
