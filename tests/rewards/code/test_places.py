"""A sandbox that something outside kills costs no program."""

import os
import signal
import threading
import time

import psutil
import pytest

from mcore_rl.process.server_keys import SANDBOX_URL
from mcore_rl.rewards.code import places as code_places
from mcore_rl.rewards.code.places import ATTEMPTS, execute
from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.limits import Limits, RunVerdict, SandboxError


def wardens() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [p for p in children if "mcore_rl.services.sandbox.warden" in " ".join(p.cmdline())]


def test_a_program_whose_sandbox_is_killed_runs_again() -> None:
    execute(CodeRequest("print(0)"))
    marks = []

    def kill() -> None:
        time.sleep(1.0)
        for warden in wardens():
            os.kill(warden.pid, signal.SIGKILL)
            marks.append(warden.pid)

    killer = threading.Thread(target=kill)
    killer.start()
    request = CodeRequest("import time\ntime.sleep(2)\nprint(1)", limits=Limits(wall_s=30.0))
    result = execute(request)
    killer.join()
    assert marks, "there were wardens to kill"
    assert result.verdict == RunVerdict.OK and result.ran and result.ran.stdout == b"1\n"


def test_a_sandbox_that_always_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def failing(request: CodeRequest) -> CodeResult:
        requests.append(request)
        return CodeResult(RunVerdict.SANDBOX_ERROR, message="no namespaces")

    monkeypatch.setattr(code_places, "run_code", failing)
    with pytest.raises(SandboxError, match=f"this process failed {ATTEMPTS} times.*no namespaces"):
        execute(CodeRequest("print(1)"))
    assert len(requests) == ATTEMPTS


def test_the_server_at_an_address_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(url: str, request: CodeRequest) -> CodeResult:
        asked.append((url, request.code))
        return CodeResult(RunVerdict.SANDBOX_ERROR, message="busy")

    monkeypatch.setattr(code_places, "run_on_server", answer)
    with pytest.raises(SandboxError, match=r"the sandbox at http://\*\*\*@host failed"):
        execute(CodeRequest("print(1)"), "http://any:key-of-mine@host")
    assert asked == [("http://any:key-of-mine@host", "print(1)")] * ATTEMPTS
    monkeypatch.setenv(SANDBOX_URL, "http://of-the-run/run_code")
    for url in ("", "http://of-the-recipe"):
        with pytest.raises(SandboxError):
            execute(CodeRequest("print(2)"), url)
    asked_later = [url for url, code in asked if code == "print(2)"]
    assert asked_later[::ATTEMPTS] == ["http://of-the-run/run_code", "http://of-the-recipe"]
