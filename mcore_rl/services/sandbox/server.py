"""Serves a sandbox over HTTP: POST /run_code as SandboxFusion does, sessions, GET /healthz.

The event loop only reads and writes. Executions wait in threads, whose deadlines hold outside of
them, so the server answers however programs behave. `serve` is `mcore-rl sandbox serve`.
"""

import asyncio
import base64
import hmac
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from mcore_rl.process.network import refuse_open_door, url_of
from mcore_rl.process.server_keys import parse_json, read_key_file
from mcore_rl.services.sandbox import wire
from mcore_rl.services.sandbox.limits import SandboxError, SandboxFullError
from mcore_rl.services.sandbox.service import Sandbox, SandboxOptions

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 << 20
_OPEN_PATHS = ("/healthz",)


class SandboxServer:
    """The routes of a sandbox.

    key           what requests must bring as `Authorization: Bearer <key>`; empty: nothing
    busy_status   HTTP status of a request that found the queue full
    """

    def __init__(self, sandbox: Sandbox, key: str = "", busy_status: int = 429) -> None:
        self._sandbox = sandbox
        self._key = key
        self._busy_status = busy_status
        options = sandbox.options
        # One thread for each request that may run or wait, so that none waits for a thread.
        num_threads = options.workers + options.max_waiting + options.max_sessions + 4
        self._threads = ThreadPoolExecutor(num_threads, "sandbox")
        self._num_running = 0

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard()])
        app.router.add_get("/healthz", self._health)
        app.router.add_post("/run_code", self._run_code)
        app.router.add_post("/sessions", self._open)
        app.router.add_post("/sessions/{name}/call", self._call)
        app.router.add_post("/sessions/{name}/files", self._put)
        app.router.add_post("/sessions/{name}/snapshot", self._get)
        app.router.add_delete("/sessions/{name}", self._close)
        app.on_cleanup.append(self._end)
        return app

    def _guard(self) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            given = _key_in(request.headers.get("Authorization", ""))
            is_open = not self._key or request.path in _OPEN_PATHS
            if not is_open and not hmac.compare_digest(given.encode(), self._key.encode()):
                return _error(401, "this sandbox wants a key: Authorization: Bearer <key>")
            try:
                return await handler(request)
            except SandboxFullError as error:
                return _error(self._busy_status, str(error), {"Retry-After": "1"})
            except SandboxError as error:
                return _error(503, str(error))
            except ValueError as error:
                return _error(422, str(error))

        return guard

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(self._sandbox.health())

    async def _run_code(self, request: web.Request) -> web.Response:
        body = await _body(request)
        options = self._sandbox.options
        wanted = wire.read_request(body, options.limits, options.max_memory_mib)
        if self._num_running >= options.workers + options.max_waiting:
            raise SandboxFullError(
                f"all {options.workers} workers of the sandbox are busy, and {options.max_waiting}"
                " requests wait: try again later, or start it with more workers"
            )
        self._num_running += 1
        try:
            result = await self._run_in_thread(lambda: self._sandbox.run_code(wanted))
        finally:
            self._num_running -= 1
        return web.json_response(wire.write_result(result))

    async def _open(self, request: web.Request) -> web.Response:
        body = await _body(request)
        options = self._sandbox.options
        limits = wire.read_limits(body, options.limits, options.max_memory_mib)
        files = wire.read_files(body.get("files"))
        kind = "python" if body.get("kind") is None else wire.text(body, "kind")
        whole = self._sandbox.session_limits(limits)
        name, _ = await self._run_in_thread(lambda: self._sandbox.open_session(kind, whole, files))
        return web.json_response({"session": name, "idle_s": options.idle_s})

    async def _call(self, request: web.Request) -> web.Response:
        body = await _body(request)
        session = self._sandbox.sessions.find(request.match_info["name"])
        timeout_s = wire.seconds(body, "timeout", self._sandbox.options.limits.wall_s)
        code = wire.text(body, "code")
        result = await self._run_in_thread(lambda: session.call(code, timeout_s))
        return web.json_response(wire.write_call(result))

    async def _put(self, request: web.Request) -> web.Response:
        body = await _body(request)
        session = self._sandbox.sessions.find(request.match_info["name"])
        files = wire.read_files(body.get("files"))
        await self._run_in_thread(lambda: session.put(files))
        return web.json_response({"num_files": len(files)})

    async def _get(self, request: web.Request) -> web.Response:
        body = await _body(request)
        session = self._sandbox.sessions.find(request.match_info["name"])
        given = body.get("paths")
        paths = None if given is None else wire.read_paths(given, "paths")
        files = await self._run_in_thread(lambda: session.get(paths))
        return web.json_response({"files": wire.write_files(files)})

    async def _close(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self._run_in_thread(lambda: self._sandbox.sessions.close(name))
        return web.json_response({"closed": name})

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _end(self, app: web.Application) -> None:
        await self._run_in_thread(self._sandbox.close)
        self._threads.shutdown(wait=False, cancel_futures=True)


def _key_in(header: str) -> str:
    """Return the key of an Authorization header, or an empty text.

    Basic authentication counts as well, with the key as password: clients that take nothing but a
    URL send it for http://user:key@host.
    """
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).decode().partition(":")[2]
        except ValueError:  # not base64, or not UTF-8
            return ""
    return ""


async def _body(request: web.Request) -> Mapping[str, Any]:
    """Return the request's JSON object; ValueError if it is none."""
    body = parse_json(await request.read() or b"{}")
    if not isinstance(body, dict):
        raise ValueError(f"the body of {request.path} must be a JSON object")
    return body


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.json_response({"error": text}, status=status, headers=headers)


def serve(
    options: SandboxOptions,
    host: str,
    port: int,
    key_file: Path | None,
    busy_status: int,
    once: bool = False,
) -> None:
    """Serve a sandbox until Ctrl-C or SIGTERM; with `once`, stop when it is ready.

    Raises ValueError without a key if other machines reach `host`, or if the port is taken, and
    SandboxError if this machine allows no sandbox.
    """
    key = choose_key(key_file, host)
    try:
        listener = socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ValueError(f"--host={host} --port={port}: {error.strerror}") from None
    sandbox = Sandbox(options)
    try:
        sandbox.warm_up()
        print(describe(sandbox, listener), file=sys.stderr, flush=True)
        if once:
            return
        app = SandboxServer(sandbox, key, busy_status).make_app()
        web.run_app(app, sock=listener, print=None, handle_signals=True)
    finally:
        sandbox.close()
        listener.close()


def choose_key(key_file: Path | None, host: str) -> str:
    """Return the key in `key_file`, or an empty text; ValueError if others reach `host` then."""
    if key_file is not None:
        return read_key_file(key_file)
    refuse_open_door(host, "run programs")
    return ""


def describe(sandbox: Sandbox, listener: socket.socket) -> str:
    """Return what was found at start: the address, the languages, and what bounds memory."""
    url = url_of(*listener.getsockname()[:2])
    lines = [f"sandbox at {url}/run_code, {sandbox.options.workers} workers"]
    lines += [f"  {name:12}{where}" for name, where in sandbox.list_programs().items()]
    if sandbox.has_cgroups():
        lines.append("  memory and processes of a program are bounded together, by cgroups")
    else:
        lines.append("  cgroups cannot be written: memory is bounded for each process")
    return "\n".join(lines)
