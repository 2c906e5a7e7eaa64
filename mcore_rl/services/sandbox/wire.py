"""Reads requests and writes answers in the form of SandboxFusion's POST /run_code.

The fields are those of its server (sandbox/server/sandbox_api.py); `verdict` and `account` are
added. Files are base64 texts by path.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult, set_wall
from mcore_rl.services.sandbox.limits import Limits, RunRecord, RunVerdict
from mcore_rl.services.sandbox.session import CallResult

Body = Mapping[str, Any]
MAX_TIMEOUT_S = 3600.0
_FINISHED, _LATE = "Finished", "TimeLimitExceeded"


def read_request(body: Body, defaults: Limits, ceiling_mib: int) -> CodeRequest:
    """Return the request in the body of /run_code; ValueError names a field that is wrong.

    ceiling_mib   the most memory that a request may ask for
    """
    fetched = body.get("fetch_files")
    return CodeRequest(
        code=text(body, "code"),
        language=text(body, "language"),
        stdin="" if body.get("stdin") is None else text(body, "stdin"),
        compile_s=seconds(body, "compile_timeout", defaults.wall_s),
        files=read_files(body.get("files")),
        fetch=tuple(read_paths([] if fetched is None else fetched, "fetch_files")),
        limits=read_limits(body, defaults, ceiling_mib),
    )


def read_limits(body: Body, defaults: Limits, ceiling_mib: int) -> Limits:
    """Return the limits that a body asks for with run_timeout and memory_limit_MB."""
    limits = set_wall(defaults, seconds(body, "run_timeout", defaults.wall_s))
    memory_mib = body.get("memory_limit_MB")
    if memory_mib is None:
        return limits
    is_whole = isinstance(memory_mib, int) and not isinstance(memory_mib, bool)
    if is_whole and memory_mib == -1:
        return limits
    if not is_whole or not 1 <= memory_mib <= ceiling_mib:
        raise ValueError(
            f"memory_limit_MB={_show(memory_mib)}: -1 for {defaults.memory_mib}, or 1 to"
            f" {ceiling_mib} (--max-memory-mib of the server)"
        )
    return replace(limits, memory_mib=memory_mib)


def read_files(given: object) -> dict[str, bytes]:
    """Return the files of a body by path; ValueError if they are not base64."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"files is {type(given).__name__}: give an object of base64 texts by path")
    files = {}
    for path, encoded in given.items():
        try:
            files[path] = base64.b64decode("" if encoded is None else encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise ValueError(f"files[{_show(path)}] is not base64") from None
    return files


def read_paths(given: object, name: str) -> list[str]:
    if not isinstance(given, list) or not all(isinstance(path, str) for path in given):
        raise ValueError(f"{name}={_show(given)}: give a list of paths")
    return given


def write_files(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(content).decode() for path, content in files.items()}


def write_result(result: CodeResult) -> dict[str, Any]:
    """Return the answer of /run_code."""
    status = {RunVerdict.OK: "Success", RunVerdict.SANDBOX_ERROR: "SandboxError"}
    return {
        "status": status.get(result.verdict, "Failed"),
        "message": result.message,
        "compile_result": write_record(result.compiled),
        "run_result": write_record(result.ran),
        "executor_pod_name": None,
        "files": write_files(result.files),
        "verdict": result.verdict.value,
        "account": {
            name: record.account()
            for name, record in (("compile", result.compiled), ("run", result.ran))
            if record is not None
        },
    }


def write_record(record: RunRecord | None) -> dict[str, Any] | None:
    """Return a record as SandboxFusion's CommandRunResult."""
    if record is None:
        return None
    is_late = record.verdict == RunVerdict.TIMEOUT
    return {
        "status": _LATE if is_late else _FINISHED,
        "execution_time": record.wall_s,
        # A killed program has a status of its own even where its own exit was 0.
        "return_code": None if is_late else record.status or int(record.verdict != RunVerdict.OK),
        "stdout": record.stdout.decode(errors="replace"),
        "stderr": record.stderr.decode(errors="replace"),
    }


def write_call(result: CallResult) -> dict[str, Any]:
    """Return the answer of a call in a session."""
    return {
        "stdout": result.stdout.decode(errors="replace"),
        "stderr": result.stderr.decode(errors="replace"),
        "status": result.status,
        "error": result.error,
        "is_alive": result.is_alive,
        "execution_time": result.wall_s,
    }


def text(body: Body, name: str) -> str:
    """Return a text in a body; ValueError if it is none."""
    value = body.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}={_show(value)}: give a text")
    return value


def seconds(body: Body, name: str, default: float) -> float:
    """Return a number of seconds in a body; ValueError if it is none or too many."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}={_show(value)}: give seconds, more than 0")
    if value > MAX_TIMEOUT_S:
        raise ValueError(f"{name}={value}: at most {MAX_TIMEOUT_S:g} seconds")
    return float(value)


def _show(value: object) -> str:
    return repr(value)[:64]
