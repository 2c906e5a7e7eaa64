"""Programs of other languages: compiled once where that is possible, each test on its own."""

from dataclasses import replace

import pytest

from mcore_rl.rewards.code import execution as code_compiled
from mcore_rl.rewards.code.execution import CaseSettings, run_other, script_case
from mcore_rl.rewards.code.languages import Program
from mcore_rl.rewards.code.places import execute
from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.languages import find_languages

FOUND = find_languages()
ADD = {
    "c": '#include <stdio.h>\nint main(){int a,b;scanf("%d%d",&a,&b);printf("%d\\n",a+b);}',
    "cpp": "#include <iostream>\nint main(){int a,b;std::cin>>a>>b;std::cout<<a+b<<'\\n';}",
    "rust": (
        "fn main(){let mut s=String::new();std::io::stdin().read_line(&mut s).unwrap();"
        'println!("{}",s.split_whitespace().map(|x|x.parse::<i32>().unwrap()).sum::<i32>())}'
    ),
    "java": (
        "public class Main{public static void main(String[] x){var s=new java.util.Scanner("
        "System.in);System.out.println(s.nextInt()+s.nextInt());}}"
    ),
    "nodejs": (
        "const [a,b]=require('fs').readFileSync(0,'utf8').split(' ').map(Number);console.log(a+b)"
    ),
    "bash": "read a b; echo $((a + b))",
    "go": (
        'package main\nimport "fmt"\nfunc main() { var a, b int; fmt.Scan(&a, &b);'
        " fmt.Println(a + b) }"
    ),
    "typescript": (
        "const [a, b]: number[] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number);"
        "console.log(a + b)"
    ),
}
TESTS = [script_case("1 2\n"), script_case("30 4\n"), script_case("-5 5\n")]
C_EXITS = (
    "#include <stdlib.h>\n#include <stdio.h>\n#include <unistd.h>\n#include <signal.h>\n"
    'int main(){int n;scanf("%d",&n);'
)


@pytest.mark.parametrize("language", ADD)
def test_a_right_program_passes(language: str) -> None:
    if language not in FOUND:
        pytest.skip(f"this machine has no {language}")
    runs = run_other(Program(ADD[language], language), TESTS)
    assert [run.out for run in runs] == ["3\n", "34\n", "0\n"], runs
    assert all(run.is_clean for run in runs)


TABLES = [
    script_case("create table t(a, b); insert into t values (1, 'x'), (2, 'y')"),
    script_case("create table t(a, b); insert into t values (7, 'z'); -- no statement"),
]


@pytest.mark.skipif("sql" not in FOUND, reason="this machine has no sqlite3")
def test_a_query_runs_on_the_tables_of_each_test() -> None:
    runs = run_other(Program("select b, a from t order by a desc", "sql"), TABLES)
    assert [run.out for run in runs] == ["y|2\nx|1\n", "z|7\n"], runs
    wrong = run_other(Program("select c from t;", "sql"), TABLES)
    assert not any(run.is_clean for run in wrong)
    assert "no such column: c" in wrong[0].error


needs_c = pytest.mark.skipif("c" not in FOUND, reason="this machine has no C")


@needs_c
def test_a_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    languages = []

    def counting(request: CodeRequest, url: str) -> CodeResult:
        languages.append(request.language)
        return execute(request, url)

    monkeypatch.setattr(code_compiled, "execute", counting)
    assert len(run_other(Program(ADD["c"], "c"), TESTS)) == 3
    assert languages.count("c") == 1, "the driver of further tests executes what it made"


needs_go = pytest.mark.skipif("go" not in FOUND, reason="this machine has no Go")


@needs_go
@pytest.mark.parametrize("compiles_always", [False, True])
def test_go_is_compiled_once_where_the_sandbox_takes_an_executable(
    compiles_always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server of the API compiles whatever it gets, and so refuses an empty source."""
    sources = []

    def counting(request: CodeRequest, url: str) -> CodeResult:
        sources.append(request.code)
        if compiles_always:
            request = replace(request, files={})
        return execute(request, url)

    monkeypatch.setattr(code_compiled, "execute", counting)
    runs = run_other(Program(ADD["go"], "go"), TESTS)
    assert [run.out for run in runs] == ["3\n", "34\n", "0\n"], runs
    source = ADD["go"]
    assert sources == ([source, "", source, source] if compiles_always else [source, "", ""])


@needs_c
def test_a_program_that_does_not_compile_fails_all() -> None:
    runs = run_other(Program("int main( {", "c"), TESTS)
    assert [run.is_clean for run in runs] == [False] * 3
    assert "error" in runs[0].error and runs[0].out == ""


@needs_c
def test_each_end_is_that_of_its_test() -> None:
    source = C_EXITS + 'if(n==1)return 3;if(n==2)abort();if(n==3)for(;;);printf("%d",n);}'
    tests = [script_case(str(n)) for n in (4, 1, 2, 3, 4)]
    runs = run_other(Program(source, "c"), tests, CaseSettings(wall_s=1.5))
    assert [run.status for run in runs][:3] == [0, 3, 134]
    assert runs[3].killed and [run.out for run in runs[::4]] == ["4", "4"]


@pytest.mark.parametrize("cheat", ["kill(getppid(),9);", 'unlink("program");_exit(0);'])
@needs_c
def test_programs_that_cheat_pass_nothing(cheat: str) -> None:
    """They kill who supervises them, or take away what later tests execute.

    Nobody supervises the first test but process 1, which does not let itself be killed.
    """
    source = C_EXITS + cheat + 'printf("1");fflush(stdout);}'
    runs = run_other(Program(source, "c"), TESTS)
    assert not any(run.is_clean and run.out for run in runs[1:])


def test_without_time_further_tests_fail() -> None:
    source = "sleep 2; echo done"
    settings = CaseSettings(wall_s=5.0, total_s=0.5, compile_s=0.5)
    runs = run_other(Program(source, "bash"), TESTS, settings)
    assert "no end within 0.5 s" in runs[0].killed
    assert not any(run.is_clean for run in runs)


def test_a_language_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="this machine has no fortran"):
        run_other(Program("", "fortran"), TESTS)
