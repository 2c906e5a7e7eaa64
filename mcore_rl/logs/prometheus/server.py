"""Serves the metrics of a running run at /metrics, from the process that logs them."""

import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from mcore_rl.logs.progress import say
from mcore_rl.logs.prometheus.exposition import CONTENT_TYPE, write_exposition

PATH = "/metrics"
_JOIN_S = 5.0


class PrometheusServer:
    """Keeps the last value of each metric, and answers GET /metrics with them."""

    def __init__(self, run: str, host: str, port: int, total_steps: int | None) -> None:
        """Begin to listen. `port` 0: a free one, which the console names.

        Raises ValueError if the port is taken.
        """
        self._run = run
        self._metrics: dict[str, float] = {}
        self._of_run: dict[str, float] = {}
        if total_steps is not None:
            self._of_run["mcore_rl_steps_total"] = float(total_steps)
        self._lock = threading.Lock()
        try:
            self._server = _Server((host, port), self.write)
        except OSError as error:
            raise ValueError(
                f"log.prometheus_port={port} on {host}: {error}; choose another port, or 0 for one"
                " that is free"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="prometheus", daemon=True
        )
        self._thread.start()
        say(f"metrics for Prometheus: {self.url}")

    @property
    def url(self) -> str:
        """Return the address of the metrics."""
        return f"http://{self._server.server_address[0]}:{self._server.server_port}{PATH}"

    def note(self, step: int, metrics: Mapping[str, float], alarms: Mapping[str, bool]) -> None:
        """Take over a row of metrics, and which alarms are on."""
        with self._lock:
            self._metrics.update(metrics)
            self._of_run |= {"mcore_rl_step": float(step), "mcore_rl_logged_seconds": time.time()}
            self._of_run |= {f"mcore_rl_alarm/{name}": float(on) for name, on in alarms.items()}

    def write(self) -> str:
        """Return the answer to Prometheus."""
        with self._lock:
            return write_exposition(self._run, self._metrics, self._of_run)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], write: Callable[[], str]) -> None:
        self.write = write
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET /metrics; anything else is 404 or 501."""

    timeout = 30

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        is_there = self.path.partition("?")[0] == PATH
        body = self.server.write().encode() if is_there else b"the metrics are at /metrics\n"
        self.send_response(200 if is_there else 404)
        self.send_header("Content-Type", CONTENT_TYPE if is_there else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: Prometheus asks every few seconds."""
