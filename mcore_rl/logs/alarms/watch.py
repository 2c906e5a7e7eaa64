"""Tells the alarms of a run: on the console, in its log, in alarms.jsonl, and to whom it may be.

alarms of a step --> a queue --> one thread: POST with a deadline, a command with a deadline

The run neither stops nor waits for the thread.
"""

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from mcore_rl.config.alarms import AlarmsConfig
from mcore_rl.logs.alarms.conditions import AlarmEvent, MetricAlarm, note_first
from mcore_rl.logs.progress import say
from mcore_rl.logs.rows import RowFile, iter_rows
from mcore_rl.process.errors import describe_error
from mcore_rl.process.network import open_outside
from mcore_rl.process.redaction import redact, remember_secret

_log = logging.getLogger(__name__)

MOST_WAITING = 100
"""Alarms that wait while one is delivered; further ones are dropped with a line in the log."""


class AlarmDelivery:
    """Sends JSON objects to a webhook, a command, or both."""

    def __init__(self, webhook: str, command: Sequence[str], timeout_s: float) -> None:
        """`timeout_s`: deadline of each, and of what is still waiting at the end."""
        remember_secret(webhook)
        self._webhook = webhook
        self._command = list(command)
        self._environment = dict(os.environ)  # here: another thread may set variables later
        self._timeout_s = timeout_s
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None

    def send(self, alarm: Mapping[str, Any]) -> None:
        """Have the alarm delivered; return at once."""
        if not self._webhook and not self._command:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name="alarms", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(json.dumps(alarm).encode())
        except queue.Full:
            _log.warning("an alarm is not delivered: %d others wait", MOST_WAITING)

    def close(self) -> None:
        """Wait for what is under way, within the deadline."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(2 * self._timeout_s)

    def _deliver(self) -> None:
        while (body := self._waiting.get()) is not None:
            if self._webhook:
                self._post(body)
            if self._command:
                self._run(body)

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(
            self._webhook, body, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with open_outside(request, self._timeout_s):
                pass
        except (OSError, ValueError) as error:  # URLError is an OSError
            told = redact(describe_error(error))
            _log.warning("alarms.webhook: the alarm was not delivered: %s", told)

    def _run(self, body: bytes) -> None:
        quiet = subprocess.DEVNULL
        try:
            with subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=quiet,
                stderr=quiet,
                env=self._environment,
                start_new_session=True,
            ) as process:
                self._wait(process, body)
        except OSError as error:
            _log.warning("alarms.command: %s", describe_error(error))
            return
        if process.returncode:
            status = process.returncode
            _log.warning("alarms.command=%s ended with status %d", self._command, status)

    def _wait(self, process: subprocess.Popen[bytes], body: bytes) -> None:
        """Wait for the end; at the deadline, kill the command with all that it has started."""
        try:
            process.communicate(body, timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


_log = logging.getLogger(__name__)

MOST_EARLIER = 1000
"""Rows of an earlier launch among which the first values of metrics are looked for."""


class AlarmWatch:
    """The alarms of a run. A resume tells those anew that are still on."""

    def __init__(
        self,
        run_dir: Path,
        alarms: Sequence[MetricAlarm],
        options: AlarmsConfig,
        last_step: int | None = None,
        rotate_bytes: int = 0,
    ) -> None:
        """
        last_step      step of the checkpoint that the run continues from; None: it begins
        rotate_bytes   size at which alarms.jsonl becomes a segment; 0: never
        """
        self._run = run_dir.name
        self._alarms = alarms
        self._delivery = AlarmDelivery(options.webhook, options.command, options.timeout_s)
        if last_step is not None:
            earlier = islice(iter_rows(run_dir / "metrics.jsonl"), MOST_EARLIER)
            note_first(alarms, (row for row in earlier if row["step"] <= last_step))
        self._rows = RowFile(run_dir / "alarms.jsonl", last_step, rotate_bytes)

    @property
    def states(self) -> Mapping[str, bool]:
        """Return which alarms are on, by name."""
        return {alarm.name: alarm.is_on for alarm in self._alarms}

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell what a row of metrics begins or ends."""
        for alarm in self._alarms:
            event = alarm.note(step, metrics)
            if event is not None:
                self._tell(event)

    def close(self) -> None:
        self._delivery.close()
        self._rows.close()

    def _tell(self, event: AlarmEvent) -> None:
        row = asdict(event)
        self._rows.write({"step": event.step, "timestamp": round(time.time(), 3), **row})
        _log.log(logging.WARNING if event.state == "on" else logging.INFO, event.text)
        say(event.text)
        self._delivery.send({"run": self._run, **row, "text": f"{self._run}: {event.text}"})
