"""Programs in a real sandbox: how they end, and when there is no answer at all."""

import pytest

from mcore_rl.rewards import code_execution
from mcore_rl.rewards.code_execution import CaseLimits, call_case, run_cases, script_case
from mcore_rl.sandbox.run import Limits, Outcome, SandboxError

QUICK = CaseLimits(wall_s=2.0)


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
    "outcome",
    [Outcome(1, "", "no memory"), Outcome(137, "", "", "no end within 20 s")],
)
def test_a_sandbox_in_which_nothing_began_is_an_error(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(source: str, stdin: str, limits: Limits) -> Outcome:
        return outcome

    monkeypatch.setattr(code_execution, "execute", failing)
    with pytest.raises(SandboxError, match="ended before a program began"):
        run_cases(["print(1)"], [script_case("")])


def test_a_test_that_the_sandbox_refuses_is_an_error() -> None:
    """An input that is larger than all files may be."""
    small = CaseLimits(files_mib=1)
    with pytest.raises(SandboxError, match="no file for standard input"):
        run_cases(["print(1)"], [script_case("x" * (2 << 20))], small)


@pytest.mark.parametrize("field", ["wall_s", "cpu_s", "total_s", "output_kib"])
def test_limits_without_sense_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"limit {field} of a test is 0"):
        CaseLimits(**{field: 0})
