"""Runs the code of a reward in a sandbox of this process, or on a server.

    request --> the recipe's server, else the run's, else this process's sandbox --> result
                  ^ again, if the sandbox was lost meanwhile

A server is `mcore-rl sandbox serve`, or another with SandboxFusion's API. A server that is busy, or
was killed and starts again, is waited for.
"""

import base64
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mcore_rl.process import server_keys
from mcore_rl.process.redaction import redact
from mcore_rl.process.server_keys import bearer, split_key
from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.limits import RunRecord, RunVerdict, SandboxError
from mcore_rl.services.sandbox.service import run_code
from mcore_rl.services.sandbox.wire import write_files
from mcore_rl.services.search.client import Ask, SearchUnavailableError, ask_json

PATIENCE_S = 300.0
"""How long a server may be away or busy, besides the time of the program itself."""
ATTEMPTS = 3
"""A sandbox that something outside has killed is another one at the next attempt."""


def run_on_server(url: str, request: CodeRequest) -> CodeResult:
    """Return the server's result. Threads may call it at the same time.

    url   address of the server, with or without /run_code; a key may stand in it as a password

    Raises SandboxError if the server stays away, full or broken, and ValueError with the server's
    words if it refuses the request.
    """
    address, key = _endpoint(url)
    deadline_s = PATIENCE_S + request.compile_s + request.limits.wall_s
    try:
        return read_answer(ask_json(Ask(address, _body(request), bearer(key), deadline_s)))
    except SearchUnavailableError as error:
        raise SandboxError(str(error)) from None


def read_answer(answer: Any) -> CodeResult:
    """Return the result in the body of an answer. Raises SandboxError if it has none."""
    if not isinstance(answer, Mapping) or "status" not in answer:
        raise SandboxError(f"{answer!r:.200} is no answer of a sandbox")
    compiled, ran = (_record(answer, name) for name in ("compile", "run"))
    last = ran or compiled
    message = str(answer.get("message") or "")
    if answer["status"] == "SandboxError" or last is None:
        return CodeResult(RunVerdict.SANDBOX_ERROR, message=message or f"{answer!r:.200}")
    files = answer.get("files") or {}
    contents = {path: base64.b64decode(text) for path, text in files.items() if text}
    return CodeResult(last.verdict, compiled, ran, contents, message)


def _record(answer: Mapping[str, Any], name: str) -> RunRecord | None:
    """Return the record of a step; SandboxFusion's own server tells no limit but that of time."""
    given = answer.get(f"{name}_result")
    if given is None:
        return None
    account = (answer.get("account") or {}).get(name) or {}
    status = account.get("status", given.get("return_code"))
    is_late = given.get("status") == "TimeLimitExceeded"
    found = RunVerdict.OK if status == 0 else RunVerdict.WRONG
    verdict = RunVerdict(account.get("verdict", RunVerdict.TIMEOUT if is_late else found))
    late = f"no end within {given.get('execution_time') or 0:g} s" if is_late else ""
    return RunRecord(
        verdict,
        int(137 if status is None else status),
        (given.get("stdout") or "").encode(),
        (given.get("stderr") or "").encode(),
        account.get("killed", late),
    )


def _body(request: CodeRequest) -> dict[str, Any]:
    return {
        "code": request.code,
        "language": request.language,
        "stdin": request.stdin,
        "compile_timeout": request.compile_s,
        "run_timeout": request.limits.wall_s,
        "memory_limit_MB": request.limits.memory_mib,
        "files": write_files(request.files),
        "fetch_files": list(request.fetch),
    }


def _endpoint(url: str) -> tuple[str, str]:
    """Return (the address of /run_code, the key, or an empty text)."""
    address, key = split_key(url)
    parts = urlsplit(address)
    path = parts.path.rstrip("/")
    path = path if path.endswith("/run_code") else f"{path}/run_code"
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(
            f"sandbox_url={redact(url)}: give a server's address, such as http://10.0.0.7:8080"
        )
    return urlunsplit(parts._replace(path=path)), key


def execute(request: CodeRequest, url: str = "") -> CodeResult:
    """Return how a program ended, whatever it did.

    url   a server of SandboxFusion's API, or empty, as in `server_of`

    Raises SandboxError if no attempt found a sandbox that works, and ValueError for a language that
    its machine does not have.
    """
    url = server_of(url)
    why = ""
    for _ in range(ATTEMPTS):
        result = run_on_server(url, request) if url else run_code(request)
        if result.verdict != RunVerdict.SANDBOX_ERROR:
            return result
        why = result.message
    where = f"the sandbox at {redact(url)}" if url else "the sandbox of this process"
    raise SandboxError(f"{where} failed {ATTEMPTS} times, at last: {why}")


def server_of(url: str) -> str:
    """Return the server on which programs run; empty: they run in the sandbox of this process.

    url   the server that the recipe names; empty: the one that the run has started, if it has
    """
    return url or server_keys.read_sandbox_url()
