"""Serves the metrics of a running run at /metrics, from the process that logs them.

router/layer_3/idle_share=0.1  -->  mcore_rl_router_layer{run="grpo",i="3",name="idle_share"} 0.1

A metric with placeholders in docs/metrics.md is one of Prometheus' with labels.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from mcore_rl.logs.names import METRICS, find_documented
from mcore_rl.logs.progress import say

PREFIX = "mcore_rl"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OF_RUN: Mapping[str, str] = {
    "mcore_rl_step": "last step that was logged",
    "mcore_rl_steps_total": "steps of the run",
    "mcore_rl_logged_seconds": "time of the last row, seconds since 1970",
    "mcore_rl_alarm": "1 while the alarm of this name is on (monitoring.md)",
}
"""Values beside those of metrics.jsonl, with their meanings."""
_MEANINGS = {name: text for meanings in METRICS.values() for name, text in meanings.items()}
Value = tuple[Mapping[str, str], float]
"""(labels, value)"""


def name_in_prometheus(metric: str) -> tuple[str, dict[str, str]]:
    """Return the name and labels under which Prometheus gets a metric of a run."""
    documented, labels = find_documented(metric) or (metric, {})
    fixed = re.sub(r"<\w+>", "", documented)
    return "_".join([PREFIX, *re.findall(r"[A-Za-z0-9]+", fixed)]), labels


def list_names() -> dict[str, str]:
    """Return each name that Prometheus may get, with its meaning."""
    documented = {name_in_prometheus(name)[0]: text for name, text in _MEANINGS.items()}
    return {**OF_RUN, **documented}


def write_exposition(run: str, metrics: Mapping[str, float], of_run: Mapping[str, float]) -> str:
    """Return the text that Prometheus reads.

    run       name of the run, a label of each value
    metrics   values by the names of docs/metrics.md
    of_run    values by the names of OF_RUN; that of an alarm is mcore_rl_alarm/<name>
    """
    families: dict[str, list[Value]] = {}
    for name, value in of_run.items():
        family, _, alarm = name.partition("/")
        families.setdefault(family, []).append(({"alarm": alarm} if alarm else {}, value))
    for metric, value in metrics.items():
        family, labels = name_in_prometheus(metric)
        families.setdefault(family, []).append((labels, value))
    meanings = list_names()
    return "".join(
        _write_family(name, meanings.get(name, ""), run, values)
        for name, values in families.items()
    )


def _write_family(name: str, meaning: str, run: str, values: Iterable[Value]) -> str:
    lines = [f"# HELP {name} {_escape(meaning)}", f"# TYPE {name} gauge"]
    for labels, value in values:
        shown = ",".join(f'{key}="{_escape(text)}"' for key, text in {"run": run, **labels}.items())
        lines.append(f"{name}{{{shown}}} {_spell(value)}")
    return "\n".join([*lines, ""])


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _spell(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(float(value))


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
