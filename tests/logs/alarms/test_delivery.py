"""Webhooks and commands get each alarm as JSON; a broken one costs the run a line in its log."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mcore_rl.config import AlarmsConfig, Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.secrets import dump_config
from mcore_rl.logs.alarms.conditions import list_own
from mcore_rl.logs.alarms.watch import AlarmWatch
from mcore_rl.logs.logger import MetricsLogger
from mcore_rl.logs.rows import read_rows

RULE = "kl/ref > 0.2 for 1 step"


@contextmanager
def serve(may_answer: threading.Event | None = None) -> Iterator[tuple[str, list[dict]]]:
    """Yield the URL of a webhook and what it was sent; it answers once it may."""
    got: list[dict] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if may_answer is not None:
                may_answer.wait()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/T0/secret-part", got
    finally:
        server.shutdown()
        server.server_close()


def run(
    folder: Path,
    options: AlarmsConfig,
    values: list[float],
    when_logged: Callable[[], None] = lambda: None,
) -> None:
    """Log rows with these values, and make a call before the end."""
    watch = AlarmWatch(folder, list_own(options), options)
    with MetricsLogger(folder, console=False, alarms=watch) as log:
        for step, value in enumerate(values, start=1):
            log.log(step, {"kl/ref": value})
        when_logged()


def wait_for_count(things: Callable[[], Sized], num: int) -> None:
    """Wait until there are so many things; a thread goes on after the end of a run."""
    until_s = time.monotonic() + 60
    while len(things()) < num and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(things()) == num


def test_a_webhook_gets_the_onset_and_the_end(tmp_path: Path) -> None:
    with serve() as (url, got):
        run(tmp_path / "mine", AlarmsConfig(when=[RULE], webhook=url), [0.1, 0.3, 0.4, 0.1])
    assert [(sent["state"], sent["step"], sent["value"], sent["bound"]) for sent in got] == [
        ("on", 2, 0.3, 0.2),
        ("cleared", 4, 0.1, 0.2),
    ]
    assert got[0]["run"] == "mine"
    assert got[0]["text"].startswith(f"mine: alarm: {RULE}, step 2: kl/ref=0.3, above 0.2")
    rows = read_rows(tmp_path / "mine" / "alarms.jsonl")
    assert [(row["step"], row["state"], row["metric"]) for row in rows] == [
        (2, "on", "kl/ref"),
        (4, "cleared", "kl/ref"),
    ]


def test_a_run_does_not_wait_for_a_webhook(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The webhook answers once all rows are logged; a run that waited would give up on each."""
    are_logged = threading.Event()
    with serve(are_logged) as (url, got):
        options = AlarmsConfig(when=[RULE], webhook=url, timeout_s=20.0)
        run(tmp_path, options, [0.3, 0.1], are_logged.set)
    assert len(got) == 2 and "alarms.webhook" not in caplog.text


def test_a_webhook_that_does_not_answer_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def list_told() -> list[str]:
        return [r.getMessage() for r in caplog.records if "alarms.webhook" in r.getMessage()]

    is_over = threading.Event()
    with serve(is_over) as (url, got):
        run(tmp_path, AlarmsConfig(when=[RULE], webhook=url, timeout_s=0.2), [0.3, 0.1])
        wait_for_count(lambda: got, 2)
        wait_for_count(list_told, 2)
        is_over.set()
    assert "secret-part" not in "".join(list_told())


def test_a_webhook_that_is_not_there_is_told_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve() as (url, _):
        pass
    run(tmp_path, AlarmsConfig(when=[RULE], webhook=url), [0.3])
    assert "the alarm was not delivered" in caplog.text


def test_a_command_gets_the_alarm_on_standard_input(tmp_path: Path) -> None:
    program = f"import sys; open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read())"
    options = AlarmsConfig(when=[RULE], command=[sys.executable, "-c", program], timeout_s=30.0)
    run(tmp_path / "mine", options, [0.3])
    assert json.loads((tmp_path / "got").read_text())["alarm"] == RULE


def test_a_command_that_hangs_is_killed_with_what_it_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = AlarmsConfig(when=[RULE], command=["sh", "-c", "sleep 60; true"], timeout_s=0.2)
    told = "alarms.command=['sh', '-c', 'sleep 60; true'] ended with status -9"
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        run(tmp_path, options, [0.3])
        wait_for_count(lambda: [r for r in caplog.records if told in r.getMessage()], 1)
    assert time.monotonic() - begin < 50


def test_the_webhook_is_written_nowhere(tmp_path: Path) -> None:
    url = "https://hooks.example.com/services/T01/B02/abcdefgh"
    config = load_recipe("tiny_moe_grpo", [f"alarms.webhook={url}"])
    assert isinstance(config, Config) and config.alarms.webhook == url
    assert "abcdefgh" not in json.dumps(dump_config(config))
