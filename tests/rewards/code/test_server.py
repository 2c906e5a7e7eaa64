"""A real server of `mcore-rl sandbox serve`: answers, keys, refusals, and a kill on the way."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.rewards.code import places as code_server
from mcore_rl.rewards.code.execution import CaseSettings, run_cases, script_case
from mcore_rl.rewards.code.languages import Program
from mcore_rl.rewards.code.places import read_answer, run_on_server
from mcore_rl.rewards.code.tests import read_tests
from mcore_rl.services.sandbox.execution import CodeRequest
from mcore_rl.services.sandbox.languages import find_languages
from mcore_rl.services.sandbox.limits import Limits, RunVerdict, SandboxError
from tests.support.sandbox_servers import free_port, serving, write_key

KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_key(tmp_path_factory.mktemp("keys"), KEY)


@pytest.fixture(scope="module")
def url(key_file: Path) -> Iterator[str]:
    port = free_port()
    with serving(port, key_file):
        yield f"http://any:{KEY}@127.0.0.1:{port}"


def test_an_answer_is_the_result(url: str) -> None:
    source = "import sys\nopen('b', 'w').write(open('a').read() * 2)\nprint(input())\nsys.exit(3)"
    request = CodeRequest(source, stdin="in", files={"a": b"x"}, fetch=("b", "none"))
    for address in (url, f"{url}/run_code", f"{url}/"):
        result = run_on_server(address, request)
        assert result.verdict == RunVerdict.WRONG and result.files == {"b": b"xx"}
        assert result.ran is not None and (result.ran.status, result.ran.stdout) == (3, b"in\n")
    late = run_on_server(url, CodeRequest("while True: pass", limits=Limits(wall_s=1.0)))
    assert late.ran is not None and late.ran.killed == "no end within 1 s"


def test_tests_of_a_program_run_there(url: str) -> None:
    settings = CaseSettings(sandbox_url=url)
    runs = run_cases(["print(2 * int(input()))"], [script_case("1"), script_case("x")], settings)
    assert runs[0].out == "2\n" and "ValueError" in runs[1].error


def test_what_the_server_refuses_is_the_user_s_error(url: str) -> None:
    with pytest.raises(ValueError, match=r"http://127.*status 422.*has no kobol") as error:
        run_on_server(url, CodeRequest("", "kobol"))
    assert KEY not in str(error.value)
    with pytest.raises(ValueError, match="status 401"):
        run_on_server(url.replace(f"any:{KEY}@", ""), CodeRequest("print(1)"))


def test_a_server_that_is_killed_and_starts_again_costs_no_program(key_file: Path) -> None:
    port = free_port()
    url = f"http://any:{KEY}@127.0.0.1:{port}"
    results = []

    def ask() -> None:
        source = "import time\ntime.sleep(2)\nprint('whole')"
        results.append(run_on_server(url, CodeRequest(source, limits=Limits(wall_s=30.0))))

    asking = threading.Thread(target=ask)
    with serving(port, key_file) as first:
        asking.start()
        time.sleep(1.0)
        os.kill(first.pid, signal.SIGKILL)
    with serving(port, key_file):
        asking.join(100)
    assert results and results[0].ran.stdout == b"whole\n"


def test_a_server_that_stays_away_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_server, "PATIENCE_S", 0.2)
    quick = CodeRequest("print(1)", compile_s=0.2, limits=Limits(wall_s=0.2))
    with pytest.raises(SandboxError, match=r"http://127.*/run_code did not answer within 0.6 s"):
        run_on_server(f"http://127.0.0.1:{free_port()}", quick)
    with pytest.raises(ValueError, match="sandbox_url=127"):
        run_on_server("127.0.0.1:8080", quick)


def test_answers_of_sandbox_fusion_s_own_server() -> None:
    finished = {"status": "Finished", "return_code": 0, "stdout": "1", "stderr": ""}
    late = {"status": "TimeLimitExceeded", "return_code": None, "execution_time": 2.0}
    result = read_answer({"status": "Success", "run_result": finished, "files": {"a": "eA=="}})
    assert result.ran is not None and result.ran.verdict == RunVerdict.OK
    assert result.files == {"a": b"x"}
    result = read_answer({"status": "Failed", "compile_result": finished, "run_result": late})
    assert result.ran is not None and result.ran.killed == "no end within 2 s"
    assert (result.ran.status, result.verdict) == (137, RunVerdict.TIMEOUT)
    failed = {**finished, "return_code": 1}
    result = read_answer({"status": "Failed", "compile_result": failed, "run_result": None})
    assert result.verdict == RunVerdict.WRONG and result.ran is None
    result = read_answer({"status": "SandboxError", "message": "no place", "run_result": finished})
    assert (result.verdict, result.message) == (RunVerdict.SANDBOX_ERROR, "no place")


@pytest.mark.parametrize("answer", [None, [], {"error": "x"}])
def test_what_is_no_answer_is_an_error(answer: Any) -> None:
    with pytest.raises(SandboxError, match="no answer of a sandbox"):
        read_answer(answer)


@pytest.mark.skipif("go" not in find_languages(), reason="this machine has no Go")
def test_an_executable_goes_to_the_server_and_back(url: str) -> None:
    truth = {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [2, 4, 6], "language": "go"}
    program = Program("func f(n int) int { return 2 * n }", "go")
    assert read_tests(truth).results(program, CaseSettings(sandbox_url=url)) == [True] * 3
