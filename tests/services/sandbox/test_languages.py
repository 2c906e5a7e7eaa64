"""Each language that is found runs a program; one that is missing is refused by its name."""

import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.services.sandbox.execution import CodeRequest
from mcore_rl.services.sandbox.languages import choose, find_languages, readable_paths
from mcore_rl.services.sandbox.limits import Limits, RunVerdict
from mcore_rl.services.sandbox.service import Sandbox, SandboxOptions

DOUBLE = {
    "python": "print(int(input()) * 2)",
    "bash": "read x; echo $((x * 2))",
    "sql": "select 21 * 2;",
    "c": '#include <stdio.h>\nint main() { int x; scanf("%d", &x); printf("%d\\n", x * 2); }',
    "cpp": "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << x * 2 << '\\n'; }",
    "go": 'package main\nimport "fmt"\nfunc main() { var x int; fmt.Scan(&x); fmt.Println(x*2) }',
    "rust": "fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap();"
    ' println!("{}", s.trim().parse::<i32>().unwrap() * 2); }',
    "java": "import java.util.*;\npublic class Main { public static void main(String[] a) {"
    " System.out.println(new Scanner(System.in).nextInt() * 2); } }",
    "nodejs": "console.log(Number(require('fs').readFileSync(0, 'utf8')) * 2)",
    "typescript": "const x: number = 21; console.log(x * 2)",
}
FOUND = find_languages()
LIMITS = Limits(wall_s=60, cpu_s=60)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(SandboxOptions(workers=1))
    yield made
    made.close()


@pytest.mark.parametrize("name", FOUND)
def test_a_program_of_each_language_runs(sandbox: Sandbox, name: str) -> None:
    request = CodeRequest(DOUBLE[name], name, "21\n", compile_s=120, limits=LIMITS)
    result = sandbox.run_code(request)
    assert result.ran is not None, result
    assert (result.verdict, result.ran.stdout) == (RunVerdict.OK, b"42\n"), result
    assert (result.compiled is not None) == bool(FOUND[name].compile)


@pytest.mark.parametrize("name", [name for name in FOUND if FOUND[name].compile])
def test_what_does_not_compile_is_not_run(sandbox: Sandbox, name: str) -> None:
    result = sandbox.run_code(CodeRequest("none of this", name, compile_s=120, limits=LIMITS))
    assert (result.verdict, result.ran) == (RunVerdict.WRONG, None)
    assert result.compiled is not None
    assert result.compiled.status != 0
    assert result.compiled.stdout + result.compiled.stderr


def test_a_missing_language_is_refused_by_name() -> None:
    only = {"python": FOUND["python"]}
    assert choose(only, "Python3").name == "python"
    with pytest.raises(
        ValueError, match=r"language='js': this machine has no nodejs; it has python"
    ):
        choose(only, "js")


def test_programs_see_of_a_python_no_settings() -> None:
    paths = readable_paths(FOUND)
    assert sys.prefix not in paths
    assert f"{sys.prefix}/bin" in paths
    assert all(os.path.exists(path) for path in paths)
    assert not {"/", "/etc", "/home", "/root", "/usr", "/usr/local", "/var"} & set(paths)


def test_a_typescript_runner_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "nodejs" not in FOUND:
        pytest.skip("no node on this machine")
    runner = tmp_path / "bin" / "tsx"
    runner.parent.mkdir()
    runner.write_text("#!/bin/sh\n")
    runner.chmod(runner.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{runner.parent}:{os.environ['PATH']}")
    language = find_languages()["typescript"]
    assert language.run_command(100)[-2:] == (str(runner), "program.ts")
    assert "--max-old-space-size=75" in language.run_command(100)
    assert str(tmp_path) in language.paths


def test_packages_that_npm_puts_beside_a_runner_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "nodejs" not in FOUND:
        pytest.skip("no node on this machine")
    runner = tmp_path / "node_modules/tsx/dist/cli.mjs"
    runner.parent.mkdir(parents=True)
    runner.write_text("")
    runner.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tsx").symlink_to(runner)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert str(tmp_path / "node_modules") in find_languages()["typescript"].paths


@pytest.mark.parametrize("known", ["--experimental-transform-types", "--experimental-strip-types"])
def test_a_node_that_leaves_types_out_runs_typescript(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tmp_path / "bin/node"
    node.parent.mkdir()
    node.write_text(f'#!/bin/bash\n[ "$1" = {known} ] && [ "$2" = --version ] && echo v22.6.0\n')
    node.chmod(0o755)
    monkeypatch.setenv("PATH", f"{node.parent}:/bin:/usr/bin")
    if shutil.which("tsx", path=os.environ["PATH"]):
        pytest.skip("this machine has tsx, which is preferred")
    assert known in find_languages()["typescript"].run


def test_a_compiler_gets_what_it_needs() -> None:
    limits = FOUND["python"].compile_limits(Limits(memory_mib=10, processes=1), 3.0)
    assert (limits.wall_s, limits.memory_mib, limits.processes) == (3.0, 1024, 64)
    assert FOUND["python"].run_limits(Limits(processes=1)).processes == 1
