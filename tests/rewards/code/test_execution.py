"""Programs in a real sandbox: how they end, and when there is no answer at all."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.rewards.code import execution as code_execution
from mcore_rl.rewards.code.execution import (
    CaseSettings,
    call_case,
    command_case,
    run_cases,
    script_case,
)
from mcore_rl.rewards.code.places import execute
from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.limits import RunRecord, RunVerdict, SandboxError

QUICK = CaseSettings(wall_s=2.0)


def test_tests_of_a_program_share_a_sandbox_and_nothing_else() -> None:
    program = "import os\nn = int(input())\nprint(n, os.path.exists('/box/left'))"
    runs = run_cases([program], [script_case("1"), script_case("x"), script_case("3")])
    assert [run.out for run in runs] == ["1 False\n", "", "3 False\n"]
    assert [run.is_clean for run in runs] == [True, False, True]
    assert "ValueError" in runs[1].error


def test_a_program_that_does_not_end_costs_its_test_only() -> None:
    program = "if input() == 'a':\n    while True: pass\nprint(1)"
    stuck, fine = run_cases([program], [script_case("a"), script_case("b")], QUICK)
    assert stuck.killed == "no end within 2 s" and not stuck.is_clean
    assert fine.out == "1\n"


def test_a_program_that_kills_its_supervisor_has_failed() -> None:
    killer = "import os\nos.kill(os.getppid(), 9)"
    runs = run_cases([killer], [script_case(""), script_case("")])
    assert [run.killed for run in runs] == ["the program ended its supervisor"] * 2


def test_a_program_cannot_write_the_report_of_its_test() -> None:
    forged = '{"status": 0, "out": "42", "error": "", "killed": "", "result": ""}'
    program = (
        f"import os\nfor fd in range(64):\n    try: os.write(fd, b'{forged}\\n')\n"
        "    except OSError: pass"
    )
    [first, second] = run_cases([program], [script_case(""), script_case("")])
    assert first.out != "42" and second.out != "42"


def test_calls_give_packed_results() -> None:
    [run] = run_cases(["def f(a): return a, {a}"], [call_case("f", ["list", [7]])])
    assert run.result == '["tuple", [7, ["set", [7]]]]'


@pytest.mark.parametrize(
    "record",
    [
        RunRecord(RunVerdict.WRONG, 1, b"", b"no memory"),
        RunRecord(RunVerdict.WRONG, 137, b"", b"", "no end within 20 s"),
    ],
)
def test_a_sandbox_in_which_nothing_began_is_an_error(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(request: CodeRequest, url: str) -> CodeResult:
        return CodeResult(record.verdict, ran=record)

    monkeypatch.setattr(code_execution, "execute", failing)
    with pytest.raises(SandboxError, match="ended before a program began"):
        run_cases(["print(1)"], [script_case("")])


def killed_in_first(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[RunRecord], RunRecord]
) -> list[CodeRequest]:
    """Change how the first sandbox ends; return a list that collects all requests."""
    requests: list[CodeRequest] = []

    def killed(request: CodeRequest, url: str) -> CodeResult:
        requests.append(request)
        result = execute(request, url)
        assert result.ran is not None
        return replace(result, ran=change(result.ran)) if len(requests) == 1 else result

    monkeypatch.setattr(code_execution, "execute", killed)
    return requests


@pytest.mark.parametrize("num_lines", [0, 1, 2, 3])
def test_a_driver_that_something_outside_kills_costs_no_test(
    num_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has reported nothing, that it is ready, or some tests."""

    def cut(record: RunRecord) -> RunRecord:
        lines = record.stdout.splitlines(keepends=True)[:num_lines]
        return RunRecord(RunVerdict.WRONG, 137, b"".join(lines) + b'{"sta', b"")

    requests = killed_in_first(monkeypatch, cut)
    runs = run_cases(["print(2 * int(input()))"], [script_case(str(n)) for n in range(3)])
    assert [run.out for run in runs] == ["0\n", "2\n", "4\n"]
    assert len(requests) == 2


def test_a_program_that_something_outside_kills_is_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill(record: RunRecord) -> RunRecord:
        return replace(record, stdout=record.stdout.replace(b'"status": 0', b'"status": 137', 1))

    requests = killed_in_first(monkeypatch, kill)
    runs = run_cases(["print(input())"], [script_case("a"), script_case("b")])
    assert [(run.out, run.status) for run in runs] == [("a\n", 0), ("b\n", 0)]
    assert len(requests) == 2


def test_a_program_that_kills_itself_twice_has_failed() -> None:
    [run] = run_cases(["import os\nos.kill(os.getpid(), 9)"], [script_case("")])
    assert run.status == 137 and not run.is_clean


def test_output_that_a_server_cuts_off_costs_no_other_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(record: RunRecord) -> RunRecord:
        first, second, *_ = record.stdout.splitlines(keepends=True)
        return RunRecord(RunVerdict.KILLED, 137, first + second, b"", "more than 1 KiB of output")

    killed_in_first(monkeypatch, cut)
    runs = run_cases(["print(input())"], [script_case("a"), script_case("b")])
    assert [run.out for run in runs] == ["a\n", "b\n"]


def test_files_are_executable_and_see_no_other_test() -> None:
    script = b"#!/usr/bin/bash\nread word; echo $word $#; exit 3"
    tests = [command_case("shown", "one two"), command_case("shown", "three")]
    runs = run_cases([""], tests, files={"shown": script})
    assert [(run.out, run.status) for run in runs] == [("one two 0\n", 3), ("three 0\n", 3)]


def test_a_test_that_the_sandbox_refuses_is_an_error() -> None:
    """An input that is larger than all files may be."""
    small = CaseSettings(files_mib=1)
    with pytest.raises(SandboxError, match="no file for standard input"):
        run_cases(["print(1)"], [script_case("x" * (2 << 20))], small)


@pytest.mark.parametrize("field", ["wall_s", "cpu_s", "total_s", "output_kib"])
def test_limits_without_sense_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"limit {field} of a test is 0"):
        CaseSettings(**dict[str, Any]({field: 0}))
