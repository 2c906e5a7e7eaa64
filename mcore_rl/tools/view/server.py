"""Serves the page and what it asks for, on loopback, to those who have the key.

GET /?key=KEY   --> a cookie, and / without the key
GET /           --> the page (page/*.html, *.js, *.css)
GET /api/...    --> JSON
GET /image      --> a small copy of an image of a run
"""

import contextlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mcore_rl.process.network import is_loopback
from mcore_rl.process.server_keys import is_bearer
from mcore_rl.tools.view.configurations import compare, read_defaults, read_options
from mcore_rl.tools.view.watched_run import WatchedRun, make_filter, read_number

PAGE = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The browser runs nothing that does not come from this server's files."""
LOOK_EVERY_S = 1.0
DAY_S = 86400
Query = Mapping[str, str]


class ViewServer(ThreadingHTTPServer):
    """Serves runs until `shutdown`; its thread follows their files."""

    daemon_threads = True

    def __init__(self, runs: Sequence[WatchedRun], port: int) -> None:
        """Raises OSError if the port is taken."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.runs = runs
        self.key = secrets.token_urlsafe(32)
        self._is_closed = threading.Event()
        threading.Thread(target=self._follow, name="view: files", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?key={self.key}"

    def server_close(self) -> None:
        self._is_closed.set()
        super().server_close()

    def _follow(self) -> None:
        while not self._is_closed.is_set():
            is_end = True
            for run in self.runs:
                # A file may be renamed while it is read.
                with contextlib.suppress(OSError):
                    is_end = run.refresh() and is_end
            # A pause lets requests have the interpreter while long files are indexed.
            self._is_closed.wait(LOOK_EVERY_S if is_end else 0.001)

    def answer(self, path: str, query: Query) -> Any:
        """Return the JSON value of an /api path. Raises LookupError and ValueError."""
        if path == "/api/runs":
            return {"runs": [run.describe() for run in self.runs], "time": time.time()}
        if path == "/api/config":
            columns = [read_options(run.path) for run in self.runs]
            return {"rows": compare([*columns, read_defaults()])}
        run = self.find_run(query)
        if path == "/api/series":
            return run.read_series(query.get("names", "").split(","), query.get("x", "step"))
        if path == "/api/samples":
            first, number = _whole(query, "first", 0), _whole(query, "number", 50)
            sort = query.get("sort") or "-step"
            return run.list_samples(make_filter(query), sort, max(first, 0), number)
        if path == "/api/sample":
            return run.read_sample(_whole(query, "sample", -1))
        if path == "/api/groups":
            return run.list_groups(_whole(query, "step", 0), query.get("split", "train"))
        if path == "/api/timeline":
            return run.read_timeline(_maybe(query, "first_step"), _maybe(query, "last_step"))
        views = {
            "/api/faults": run.list_faults,
            "/api/memory": run.plan_memory,
            "/api/trace": run.trace,
        }
        if path not in views:
            raise LookupError(f"no {path} here")
        return views[path]()

    def find_run(self, query: Query) -> WatchedRun:
        """Return the run whose number is in the query. Raises LookupError if there is none."""
        number = _whole(query, "run", 0)
        if not 0 <= number < len(self.runs):
            raise LookupError(f"run={number}: there are {len(self.runs)} runs, counted from 0")
        return self.runs[number]


def _whole(query: Query, name: str, default: int) -> int:
    return int(read_number(name, query[name])) if query.get(name) else default


def _maybe(query: Query, name: str) -> int | None:
    return int(read_number(name, query[name])) if query.get(name) else None


class _Handler(BaseHTTPRequestHandler):
    """Answers a GET; anything else is 501."""

    protocol_version = "HTTP/1.1"

    @property
    def _view(self) -> ViewServer:
        assert isinstance(self.server, ViewServer)
        return self.server

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if not is_loopback(_host_of(self.headers.get("Host", ""))):
            self._send(403, "text/plain", b"this page is for this machine alone")
        elif _is_key(query.get("key", ""), self._view.key):
            self._let_in(parts.path)
        elif not self._has_key():
            self._send(401, "text/plain", b"open the address that `mcore-rl view` printed")
        elif parts.path.startswith("/api/"):
            self._send_json(parts.path, query)
        elif parts.path == "/favicon.ico":
            self._send(204, "image/png", b"")
        elif parts.path == "/image":
            self._send_image(query)
        else:
            self._send_file(parts.path)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: requests are none of the terminal's, and the first has the key."""

    def _has_key(self) -> bool:
        if is_bearer(self.headers.get("Authorization", ""), self._view.key):
            return True
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return False
        held = cookies.get(self._cookie)
        return held is not None and _is_key(held.value, self._view.key)

    @property
    def _cookie(self) -> str:
        """Cookies are the same for all ports of a machine, so the name has the port."""
        return f"mcore_rl_view_{self._view.server_port}"

    def _let_in(self, path: str) -> None:
        self.send_response(303)
        self.send_header("Location", path)
        cookie = f"{self._cookie}={self._view.key}; Path=/; HttpOnly; SameSite=Strict"
        self.send_header("Set-Cookie", f"{cookie}; Max-Age={DAY_S}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, path: str, query: Query) -> None:
        try:
            status, value = 200, self._view.answer(path, query)
        except LookupError as error:
            status, value = 404, {"error": str(error.args[0])}
        except (ValueError, OSError) as error:
            status, value = 400, {"error": str(error)}
        name = "trace.json" if path == "/api/trace" else ""
        self._send(status, "application/json", _encode(value), name)

    def _send_image(self, query: Query) -> None:
        try:
            file = self._view.find_run(query).find_image(query.get("path", ""))
        except (LookupError, ValueError):
            file = None
        if file is None:
            self._send(404, "text/plain", b"no such image")
        else:
            self._send(200, "image/png", file.read_bytes())

    def _send_file(self, path: str) -> None:
        files = {f"/{file.name}": file for file in PAGE.iterdir() if file.suffix in TYPES}
        file = files.get("/index.html" if path == "/" else path)
        if file is None:
            self._send(404, "text/plain", b"no such page")
        else:
            self._send(200, TYPES[file.suffix], file.read_bytes())

    def _send(self, status: int, kind: str, body: bytes, download: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        if download:
            self.send_header("Content-Disposition", f'attachment; filename="{download}"')
        self.end_headers()
        self.wfile.write(body)


def _encode(value: Any) -> bytes:
    """Return JSON without NaN, which a browser does not read."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return json.dumps(_without_nan(value)).encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return value


def _is_key(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), key.encode())


def _host_of(header: str) -> str:
    """Return the host of a Host header, so that a foreign name for this machine is noticed."""
    return urlsplit(f"//{header}").hostname or ""
