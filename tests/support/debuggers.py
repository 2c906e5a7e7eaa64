"""Attaches to processes that wait at a breakpoint(): as `ray debug`, and as VS Code does."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent


def wait_for_match(pattern: str, text: Callable[[], str], timeout_s: float) -> re.Match[str]:
    """Wait until `pattern` is found in what `text` returns."""
    until = time.monotonic() + timeout_s
    while (match := re.search(pattern, text())) is None:
        assert time.monotonic() < until, f"no {pattern!r} in {timeout_s:g} s:\n{text()[-4000:]}"
        time.sleep(0.2)
    return match


def ray_debug(told: str, *lines: str, timeout_s: float = 60.0) -> str:
    """Run the command that the message `told` names, attach to the only breakpoint, type `lines`.

    Returns what was printed.
    """
    match = re.search(r"waits for (.*ray debug \S+) on ", told)
    assert match is not None, told
    done = subprocess.run(
        ["bash", "-c", match[1]],
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        input="\n".join(["0", *lines, ""]),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.stdout


class DebugAdapter:
    """A client of the debug adapter protocol, with the requests that VS Code sends to attach."""

    def __init__(self, host: str, port: int, timeout_s: float = 60.0) -> None:
        self._socket = socket.create_connection((host, port), timeout_s)
        self._file = self._socket.makefile("rwb")
        self._sent = 0
        self._seen: list[Mapping[str, Any]] = []

    def attach(self) -> None:
        self.ask("initialize", {"adapterID": "python", "linesStartAt1": True, "pathFormat": "path"})
        attaching = self._send("attach", {"justMyCode": False})
        self.event("initialized")
        self.ask("configurationDone", {})
        self._answer(attaching)

    def stopped_frame(self) -> tuple[int, Mapping[str, Any]]:
        """Wait until a thread stops; return its number and its innermost frame."""
        thread = self.event("stopped")["threadId"]
        [frame, *_] = self.ask("stackTrace", {"threadId": thread})["stackFrames"]
        return thread, frame

    def evaluate(self, expression: str, frame: Mapping[str, Any]) -> str:
        return self.ask("evaluate", {"expression": expression, "frameId": frame["id"]})["result"]

    def go_on(self, thread: int) -> None:
        self.ask("continue", {"threadId": thread})

    def leave(self) -> None:
        self.ask("disconnect", {"terminateDebuggee": False})
        self._socket.close()

    def ask(self, command: str, arguments: Mapping[str, Any]) -> Any:
        return self._answer(self._send(command, arguments))

    def event(self, name: str) -> Any:
        return self._wait(lambda m: m["type"] == "event" and m["event"] == name).get("body", {})

    def _answer(self, number: int) -> Any:
        found = self._wait(lambda m: m["type"] == "response" and m["request_seq"] == number)
        assert found["success"], found
        return found.get("body", {})

    def _send(self, command: str, arguments: Mapping[str, Any]) -> int:
        self._sent += 1
        request = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(request).encode()
        self._file.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._file.flush()
        return self._sent

    def _wait(self, is_it: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        """Return the first message, of those not yet taken, for which `is_it`."""
        while True:
            for message in self._seen:
                if is_it(message):
                    self._seen.remove(message)
                    return message
            self._seen.append(self._read())

    def _read(self) -> Mapping[str, Any]:
        length = 0
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        assert length, "the debug adapter closed the connection"
        return json.loads(self._file.read(length))
