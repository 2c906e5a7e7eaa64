"""A sandbox in this process runs code and sessions, and tells how it is."""

import threading
from typing import Any

import pytest

from mcore_rl.services.sandbox.execution import CodeRequest
from mcore_rl.services.sandbox.limits import Limits
from mcore_rl.services.sandbox.service import Sandbox, SandboxOptions


def test_code_and_sessions_run_side_by_side() -> None:
    sandbox = Sandbox(SandboxOptions(workers=2, max_sessions=1))
    try:
        sandbox.warm_up()
        name, session = sandbox.open_session("python")
        outputs: list[bytes] = []

        def run(text: str) -> None:
            result = sandbox.run_code(CodeRequest(f"print({text!r})"))
            assert result.ran is not None
            outputs.append(result.ran.stdout)

        threads = [threading.Thread(target=run, args=(str(i),)) for i in range(8)]
        for thread in threads:
            thread.start()
        assert session.call("1 + 1", 60).stdout == b"2\n"
        for thread in threads:
            thread.join()
        assert sorted(outputs) == [f"{i}\n".encode() for i in range(8)]
        health = sandbox.health()
        assert (health["sessions"], health["busy"], health["waiting"]) == (1, 0, 0)
        assert "python" in sandbox.list_programs()
        sandbox.sessions.close(name)
    finally:
        sandbox.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0"),
        ({"max_waiting": -1}, "max_waiting=-1"),
        ({"idle_s": 0.0}, "idle_s=0"),
        ({"max_memory_mib": 100}, "max_memory_mib=100"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SandboxOptions(**options)


def test_a_session_has_the_limits_of_its_calls_and_a_longer_life() -> None:
    sandbox = Sandbox(SandboxOptions(session_s=100))
    limits = sandbox.session_limits(Limits(memory_mib=9))
    assert (limits.wall_s, limits.cpu_s, limits.memory_mib) == (100, 100, 9)
    sandbox.close()
