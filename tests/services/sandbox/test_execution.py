"""A request is compiled, run and answered with its files; what is wrong with it is named."""

from collections.abc import Iterator

import pytest

from mcore_rl.services.sandbox.box import FilesRefusedError
from mcore_rl.services.sandbox.execution import CodeRequest, check_path, execute, set_wall
from mcore_rl.services.sandbox.languages import find_languages, readable_paths
from mcore_rl.services.sandbox.limits import Limits, RunVerdict, SandboxFullError
from mcore_rl.services.sandbox.worker import WorkerPool

LANGUAGES = find_languages()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(readable_paths(LANGUAGES), num_workers=1, max_waiting=0)
    yield made
    made.close()


def test_files_go_in_and_out(pool: WorkerPool) -> None:
    source = "open('out/b', 'w').write(open('in/a').read() * 2)"
    request = CodeRequest(
        source, files={"in/a": b"x", "out/keep": b""}, fetch=("out/b", "out/none", "in/a")
    )
    result = execute(pool, LANGUAGES, request)
    assert (result.verdict, result.files) == (RunVerdict.OK, {"out/b": b"xx", "in/a": b"x"})


@pytest.mark.skipif("c" not in LANGUAGES, reason="this machine has no C")
def test_an_executable_in_place_of_a_source_runs_uncompiled(pool: WorkerPool) -> None:
    first = CodeRequest('#include <stdio.h>\nint main(){puts("made");}', "c", fetch=("program",))
    made = execute(pool, LANGUAGES, first)
    assert made.compiled is not None
    again = execute(pool, LANGUAGES, CodeRequest("", "c", files=made.files))
    assert again.compiled is None and again.ran is not None
    assert (again.verdict, again.ran.stdout) == (RunVerdict.OK, b"made\n")


def test_files_are_there_after_a_failure(pool: WorkerPool) -> None:
    source = "open('a', 'w').write('x')\nraise SystemExit(1)"
    result = execute(pool, LANGUAGES, CodeRequest(source, fetch=("a",)))
    assert (result.verdict, result.files) == (RunVerdict.WRONG, {"a": b"x"})


def test_files_that_do_not_fit_are_the_callers_error(pool: WorkerPool) -> None:
    request = CodeRequest("", files={"a": bytes(2 << 20)}, limits=Limits(files_mib=1))
    with pytest.raises(FilesRefusedError, match="No space left"):
        execute(pool, LANGUAGES, request)
    assert execute(pool, LANGUAGES, CodeRequest("")).verdict == RunVerdict.OK


def test_a_full_queue_is_no_result(pool: WorkerPool) -> None:
    with pool.lend(), pytest.raises(SandboxFullError):
        execute(pool, LANGUAGES, CodeRequest(""))


def test_an_error_of_the_sandbox_is_a_result_of_its_own() -> None:
    broken = WorkerPool(["/none/such"], num_workers=1)
    result = execute(broken, LANGUAGES, CodeRequest("print(1)"))
    assert (result.verdict, result.ran) == (RunVerdict.SANDBOX_ERROR, None)
    assert "no sandbox for programs on this machine" in result.message
    assert broken.counts()["busy"] == 0


@pytest.mark.skipif("cpp" not in LANGUAGES, reason="no g++")
def test_a_compiler_has_a_deadline(pool: WorkerPool) -> None:
    source = "#include <bits/stdc++.h>\nint main() {}"
    result = execute(pool, LANGUAGES, CodeRequest(source, "cpp", compile_s=0.05))
    assert (result.verdict, result.ran) == (RunVerdict.TIMEOUT, None)


@pytest.mark.parametrize(
    "path", ["", ".", "..", "/a", "../a", "a/../b", "a//b", "a\0", "a/", "x" * 300]
)
def test_a_path_that_leaves_the_box_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        check_path(path)


def test_processor_time_follows_the_wall() -> None:
    assert set_wall(Limits(), 2.5) == Limits(wall_s=2.5, cpu_s=3)


def test_a_compile_time_must_be_positive() -> None:
    with pytest.raises(ValueError, match="compile_s=0"):
        CodeRequest("", compile_s=0)
