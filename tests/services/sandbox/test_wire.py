"""Requests and answers of /run_code are SandboxFusion's, and a wrong field is named."""

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.services.sandbox import wire
from mcore_rl.services.sandbox.execution import CodeResult
from mcore_rl.services.sandbox.limits import Limits, RunRecord, RunVerdict

LIMITS = Limits(memory_mib=100)


def read(**fields: Any) -> Any:
    return wire.read_request({"code": "x", "language": "python"} | fields, LIMITS, 200)


def test_a_request_has_defaults() -> None:
    request = read()
    assert (request.code, request.language, request.stdin) == ("x", "python", "")
    assert (request.compile_s, request.limits.wall_s, request.limits.memory_mib) == (10, 10, 100)
    assert (dict(request.files), request.fetch) == ({}, ())


def test_a_request_is_read() -> None:
    request = read(
        stdin="in",
        compile_timeout=3,
        run_timeout=2.5,
        memory_limit_MB=150,
        files={"a": base64.b64encode(b"1").decode(), "b": None},
        fetch_files=["c"],
    )
    assert (request.stdin, request.compile_s) == ("in", 3)
    assert (request.limits.wall_s, request.limits.cpu_s, request.limits.memory_mib) == (2.5, 3, 150)
    assert (dict(request.files), request.fetch) == ({"a": b"1", "b": b""}, ("c",))
    assert read(memory_limit_MB=-1, stdin=None).limits.memory_mib == 100


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"code": 1}, "code"),
        ({"language": None}, "language"),
        ({"stdin": []}, "stdin"),
        ({"run_timeout": 0}, "run_timeout=0"),
        ({"run_timeout": "9"}, "run_timeout"),
        ({"run_timeout": 1e9}, "at most 3600"),
        ({"compile_timeout": True}, "compile_timeout"),
        ({"memory_limit_MB": 201}, "memory_limit_MB=201"),
        ({"memory_limit_MB": 0}, "memory_limit_MB=0"),
        ({"memory_limit_MB": True}, "memory_limit_MB=True"),
        ({"memory_limit_MB": False}, "memory_limit_MB=False"),
        ({"memory_limit_MB": -1.0}, "memory_limit_MB=-1.0"),
        ({"stdin": 0}, "stdin=0"),
        ({"run_timeout": False}, "run_timeout=False"),
        ({"files": 0}, "files is int"),
        ({"files": {"a": 0}}, "is not base64"),
        ({"files": {"a": False}}, "is not base64"),
        ({"fetch_files": 0}, "fetch_files=0"),
        ({"fetch_files": False}, "fetch_files=False"),
        ({"files": []}, "files is list"),
        ({"files": {"a": "?"}}, "is not base64"),
        ({"files": {"../a": ""}}, r"\.\./a"),
        ({"fetch_files": "a"}, "fetch_files"),
        ({"fetch_files": ["/etc/passwd"]}, "/etc/passwd"),
        ({"fetch_files": ["a"] * 300}, "300 to fetch"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**fields)


@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=20), max_size=5))
def test_files_go_over_the_wire(files: dict[str, bytes]) -> None:
    assert wire.read_files(wire.write_files(files)) == files


def record(verdict: RunVerdict, status: int) -> RunRecord:
    return RunRecord(verdict, status, b"out\xff", b"err", wall_s=1.5)


@pytest.mark.parametrize(
    ("verdict", "status", "whole", "part", "code"),
    [
        (RunVerdict.OK, 0, "Success", "Finished", 0),
        (RunVerdict.WRONG, 3, "Failed", "Finished", 3),
        (RunVerdict.TIMEOUT, 137, "Failed", "TimeLimitExceeded", None),
        (RunVerdict.MEMORY, 137, "Failed", "Finished", 137),
        (RunVerdict.KILLED, 0, "Failed", "Finished", 1),
    ],
)
def test_a_record_is_written(
    verdict: RunVerdict, status: int, whole: str, part: str, code: int | None
) -> None:
    answer = wire.write_result(CodeResult(verdict, ran=record(verdict, status)))
    assert (answer["status"], answer["verdict"]) == (whole, verdict.value)
    ran = answer["run_result"]
    assert (ran["status"], ran["return_code"]) == (part, code)
    assert (ran["stdout"], ran["stderr"], ran["execution_time"]) == ("out\ufffd", "err", 1.5)
    assert answer["compile_result"] is None
    assert answer["account"]["run"]["verdict"] == verdict.value


def test_an_error_of_the_sandbox_is_no_verdict_on_the_program() -> None:
    answer = wire.write_result(CodeResult(RunVerdict.SANDBOX_ERROR, message="no memory"))
    assert (answer["status"], answer["message"]) == ("SandboxError", "no memory")
    assert answer["run_result"] is None
