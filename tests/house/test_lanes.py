"""The lanes of tests: what `make test` leaves out has a witness in it, and the page says which."""

import ast
import re
import subprocess
from pathlib import Path

from tests.support.changed_rooms import find_test_folders, list_changed_files
from tests.support.policy import parse, python_files, read
from tests.support.support_index import README, list_support_files, replace_list

ROW = re.compile(r"^\| `([\w/]+\.py)` \| (.+) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)(?:::(test_\w+))?`")
SLOW = "pytest.mark.slow"
BY_LANE = re.compile(r"\b(LARGE|FAMILIES)_BY_LANE\b")
"""Lists of support/, most of whose parameters are marked so."""


def is_left_out(file: str, name: str | None) -> bool:
    """Return whether every case of a test is left out; of a file, whether every test is."""
    body = parse(Path("tests", file)).body
    tests = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.name == name or (name is None and node.name.startswith("test_")))
    ]
    assert tests, f"tests/{file} has no {name}"
    of_file = any(isinstance(n, ast.Assign) and marks_slow(n.value) for n in body if is_mark(n))
    return of_file or all(any(map(marks_slow, test.decorator_list)) for test in tests)


def is_mark(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"


def marks_slow(mark: ast.expr) -> bool:
    """Return whether a mark, or one of a list of marks, leaves out the whole test."""
    marks = mark.elts if isinstance(mark, ast.List) else [mark]
    return SLOW in map(ast.unparse, marks)


def test_each_file_of_the_nightly_lane_has_a_row_with_a_witness() -> None:
    rows = {file: witness for file, _, witness in ROW.findall(read(README))}
    marked = {
        str(path.relative_to("tests"))
        for path in python_files("tests")
        if path.name.startswith("test_")
        and path.parts[1] != "house"
        and (SLOW in read(path) or BY_LANE.search(read(path)))
    }
    assert marked == rows.keys(), f"tests/README.md: {sorted(marked ^ rows.keys())}"
    for file, witness in rows.items():
        named = NAMED.findall(witness)
        assert named or "same test" in witness or "pyright" in witness, file
        for other, name in named:
            assert not is_left_out(other, name or None), f"{file}: {other} {name} is left out, too"
        if "same test" in witness:
            assert not is_left_out(file, None), f"{file} is left out as a whole"


def test_the_list_of_tests_support_is_complete() -> None:
    page = read(README)
    assert page == replace_list(page, list_support_files()), (
        "run `.venv/bin/python -m tests.support.support_index`"
    )


def test_a_change_is_checked_by_the_tests_of_its_rooms(tmp_path: Path) -> None:
    for folder in ("algo", "data", "launch", "e2e", "house"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
    (tmp_path / "tests/test_cli.py").touch()
    changed = {
        "mcore_rl/algo/losses.py": "tests/algo",
        "tests/data/streamed/test_mixed.py": "tests/data",
        "launch/submit.py": "tests/launch",
        "mcore_rl/cli.py": "tests/test_cli.py",
        "tests/e2e/test_train.py": "tests/house",
        "tests/support/policy.py": "tests/house",
        "README.md": "tests/house",
        "mcore_rl/no_tests/at_all.py": "tests/house",
    }
    for path, expected in changed.items():
        assert find_test_folders([path], tmp_path) == sorted({expected, "tests/house"}), path
    assert find_test_folders(changed, tmp_path) == sorted(set(changed.values()))


def test_changes_are_those_since_main_committed_or_not(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    def write(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        git("add", ".")

    git("init", "--quiet", "--initial-branch=main")
    write("old", "1")
    git("commit", "--quiet", "-m", "main")
    git("switch", "--quiet", "--create", "branch")
    write("committed", "1")
    git("commit", "--quiet", "-m", "branch")
    write("old", "2")
    (tmp_path / "new").write_text("1")
    assert sorted(list_changed_files(tmp_path)) == ["committed", "new", "old"]


def test_no_test_waits_for_a_run_longer_than_it_may_take() -> None:
    """pytest-timeout would end it before the run is over, whose output then goes unseen."""
    [usual_s] = map(
        int, re.findall(r"^timeout = (\d+)$", read(Path("pyproject.toml")), re.MULTILINE)
    )
    for path in python_files("tests/e2e"):
        text = read(path)
        waits_s = [int(wait) for wait in re.findall(r"\.finish\((\d+)\)", text)]
        limits_s = [int(limit) for limit in re.findall(r"mark\.timeout\((\d+)\)", text)]
        assert max(waits_s, default=0) < max([usual_s, *limits_s]), path
