"""Measures how long the scheduler of an SGLang server has not answered.

A server whose processes all run may still be stuck: a kernel without end, a collective without
one of its ranks. The server's own check of its health would sample a token, and take a second.
"""

import threading
import urllib.request
from http.client import HTTPException

from mcore_rl.process.clock import now_s
from mcore_rl.process.network import open_directly
from mcore_rl.process.server_keys import ServerKeys, bearer

ASK_INTERVAL_S = 5.0
"""An idle scheduler sleeps, and each question wakes it."""
_PATH = "/server_info"
"""All ranks of the engine take part in the answer, between two batches."""


class Heartbeat:
    """Asks a server's scheduler, in a thread, for an answer that only its main loop gives."""

    def __init__(
        self,
        url: str,
        keys: ServerKeys | None,
        timeout_s: float,
        interval_s: float = ASK_INTERVAL_S,
    ) -> None:
        """Each question has `timeout_s`, as it may wait for a batch to end; the next one comes
        `interval_s` later at the earliest.
        """
        self._request = urllib.request.Request(
            url + _PATH, headers={} if keys is None else bearer(keys.admin)
        )
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._asked_s = now_s()
        self._silent_since_s: float | None = None
        """When the first question was asked that has no answer yet."""
        self._asking: threading.Thread | None = None

    def excuse(self) -> None:
        """Begin to count anew: what the scheduler does may take long."""
        if self._silent_since_s is not None:
            self._silent_since_s = now_s()

    def find_silence_s(self) -> float:
        """Return the seconds since the first question without an answer, and ask when it is time.

        Time in which nobody asked is no silence.
        """
        now = now_s()
        is_asking = self._asking is not None and self._asking.is_alive()
        if not is_asking and now - self._asked_s >= self._interval_s:
            self._asked_s = now
            self._silent_since_s = self._silent_since_s or now
            self._asking = threading.Thread(target=self._ask, daemon=True)
            self._asking.start()
        since_s = self._silent_since_s
        return 0.0 if since_s is None else now - since_s

    def _ask(self) -> None:
        try:
            with open_directly(self._request, self._timeout_s) as response:
                response.read()
        except (OSError, HTTPException):  # a server that died is noticed elsewhere
            return
        self._silent_since_s = None
