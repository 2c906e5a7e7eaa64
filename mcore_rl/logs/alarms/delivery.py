"""Brings alarms to a webhook and a command, beside the run, which neither stops nor waits.

alarms of a step --> a queue --> one thread: POST with a deadline, a command with a deadline
"""

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

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
