"""A headless Chromium for tests of pages: it opens addresses, runs JavaScript, takes pictures."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DEADLINE_S = 60.0
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """Return the path of a Chromium, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab of the browser. `errors` are its exceptions and errors on the console."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._ask("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression, or of its promise."""
        answer = self._ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = DEADLINE_S) -> None:
        """Return once an expression is true. Raises TimeoutError after `seconds`."""
        deadline_s = time.monotonic() + seconds
        while not self.run(f"!!({script})"):
            if time.monotonic() > deadline_s:
                shown = self.run("document.body.innerText")[:2000]
                raise TimeoutError(f"{seconds} s for {script}; errors: {self.errors}; {shown}")
            time.sleep(0.02)

    def resize(self, width: int, height: int) -> None:
        how = {"deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, **how)

    def take_picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    @property
    def errors(self) -> list[str]:
        return self._browser.errors

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)


class Browser:
    """Speaks the DevTools protocol through pipes: JSON objects that end with a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to = to_browser
        self._from = from_browser
        self._number = 0
        self._bytes = b""
        self.errors: list[str] = []

    def open_page(self) -> Page:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        return Page(self, attached["sessionId"])

    def ask(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Return the result of a command. Raises RuntimeError with the browser's error."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read_message(method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _read_message(self, method: str) -> dict[str, Any]:
        deadline_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._bytes:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline_s - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser has not answered {method} for {DEADLINE_S} s")
            block = os.read(self._from, 1 << 20)
            if not block:
                raise RuntimeError(f"the browser ended before it answered {method}")
            self._bytes += block
        line, _, self._bytes = self._bytes.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"])[:2000])
        elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            entry = event["params"]["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}")


@contextmanager
def start_browser(executable: str, profile: Path) -> Iterator[Browser]:
    """Yield a browser that keeps its files in `profile`; it is ended afterwards."""
    read_end, to_browser = os.pipe()
    from_browser, write_end = os.pipe()
    command = [executable, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    # The protocol reads from descriptor 3 and writes to 4.
    shell = f'exec "$@" 3<&{read_end} 4>&{write_end}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=(read_end, write_end),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_end)
    os.close(write_end)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.close(to_browser)  # which ends it
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser)
