"""Asks a server to run code: `mcore-rl sandbox serve`, or another of SandboxFusion's API.

A server that is busy, or was killed and starts again, is waited for.
"""

import asyncio
import base64
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from mcore_rl.process.http import open_session
from mcore_rl.process.redaction import redact
from mcore_rl.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.sandbox.limits import RunRecord, RunVerdict, SandboxError
from mcore_rl.sandbox.wire import write_files

GONE_S = 120.0
"""How long a server may be away: time to start it anew."""
QUEUE_S = 600.0
"""How long a request may wait for others, at the server or for its queue to have room."""
_PAUSE_S = 0.5
_BUSY = (429, 502, 503, 504)


def run_on_server(url: str, request: CodeRequest) -> CodeResult:
    """Return the server's result. Call it from any thread without an event loop.

    url   address of the server, with or without /run_code; a key may stand in it as a password

    Raises SandboxError if the server stays away or full, or fails at the request, and ValueError
    with the server's words if it refuses the request.
    """
    return asyncio.run(_ask_until_answered(_endpoint(url), request))


async def _ask_until_answered(url: str, request: CodeRequest) -> CodeResult:
    began_s = last_seen_s = time.monotonic()
    why = ""
    async with open_session(QUEUE_S + request.compile_s + request.limits.wall_s) as session:
        while True:
            try:
                async with session.post(url, json=_body(request)) as answer:
                    text = await answer.text()
                    if answer.status == 200:
                        return read_answer(await answer.json(content_type=None))
                    why = f"status {answer.status}: {text[:300]}"
                    if answer.status < 500 and answer.status not in _BUSY:
                        raise ValueError(f"{redact(url)} refused a program: {why}")
                    if answer.status not in _BUSY:
                        raise SandboxError(f"{redact(url)} failed at a program: {why}")
                    last_seen_s = time.monotonic()
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
            now_s = time.monotonic()
            if now_s - last_seen_s > GONE_S or now_s - began_s > QUEUE_S:
                raise SandboxError(
                    f"waited {now_s - began_s:.0f} s for {redact(url)} to run a program, at last"
                    f" {redact(why)}"
                )
            await asyncio.sleep(_PAUSE_S)


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


def _endpoint(url: str) -> str:
    url = url.rstrip("/")
    return url if url.endswith("/run_code") else f"{url}/run_code"
