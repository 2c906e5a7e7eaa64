"""Runs the server of `mcore-rl sandbox serve` until it is stopped."""

import socket
import sys
from pathlib import Path

from aiohttp import web

from mcore_rl.process.network import refuse_open_door, url_of
from mcore_rl.process.server_keys import read_key_file
from mcore_rl.services.sandbox.server import SandboxServer
from mcore_rl.services.sandbox.service import Sandbox, SandboxOptions


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
    key = serving_key(key_file, host)
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


def serving_key(key_file: Path | None, host: str) -> str:
    """Return the key in `key_file`, or an empty text; ValueError if others reach `host` then."""
    if key_file is not None:
        return read_key_file(key_file)
    refuse_open_door(host, "run programs")
    return ""


def describe(sandbox: Sandbox, listener: socket.socket) -> str:
    """Return what was found at start: the address, the languages, and what bounds memory."""
    url = url_of(*listener.getsockname()[:2])
    lines = [f"sandbox at {url}/run_code, {sandbox.options.workers} workers"]
    lines += [f"  {name:12}{where}" for name, where in sandbox.found().items()]
    if sandbox.has_cgroups():
        lines.append("  memory and processes of a program are bounded together, by cgroups")
    else:
        lines.append("  cgroups cannot be written: memory is bounded for each process")
    return "\n".join(lines)
