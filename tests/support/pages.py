"""Serves the page of `mcore-rl view` in this process, and opens it in a real browser."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcore_rl.tools.view.server import ViewServer
from mcore_rl.tools.view.watched_run import open_runs
from tests.support.browser import Browser, Page, find_browser, start_browser

READY = "document.body?.dataset.ready === 'yes'"
TABS = {
    "curves": "figure canvas",
    "samples": "tr.row",
    "groups": ".group td",
    "timeline": "#phases .span",
    "health": ".grid > *",
    "faults": ".records td",
    "memory": "h2",
    "config": "#options td",
}
"""Tab -> an element that it has once it shows something."""


@contextmanager
def serve_runs(*folders: Path) -> Iterator[ViewServer]:
    """Yield a server of these run folders."""
    with ViewServer(open_runs(folders), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def wait_for_index(server: ViewServer, seconds: float = 60.0) -> None:
    """Return once all rows that are there are indexed. Raises TimeoutError after `seconds`."""
    deadline_s = time.monotonic() + seconds
    while not all(run.describe()["is_indexed"] for run in server.runs):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"after {seconds} s: {[run.describe() for run in server.runs]}")
        time.sleep(0.01)


@contextmanager
def browse(profile: Path) -> Iterator[Browser]:
    """Yield a browser; the test is skipped where there is none."""
    executable = find_browser()
    if executable is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    with start_browser(executable, profile) as browser:
        yield browser


def open_view(browser: Browser, server: ViewServer) -> Page:
    """Return the page of a server, once it shows its first view."""
    page = browser.open_page()
    page.resize(1280, 800)
    page.open(server.url)
    page.wait(READY)
    return page


def open_tab(page: Page, name: str) -> None:
    """Return once the tab shows something."""
    page.run(f"document.getElementById('tab-{name}').click()")
    page.wait(f"document.querySelector({TABS[name]!r})")


def fill_in(page: Page, fields: dict[str, str]) -> None:
    """Type into inputs, by id."""
    for name, text in fields.items():
        page.run(
            f"(() => {{ const field = document.getElementById({name!r}); field.value = {text!r};"
            " field.dispatchEvent(new Event('input')); })()"
        )


def read_texts(page: Page, selector: str) -> Sequence[str]:
    return page.run(f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)")


def look_through(run_dir: Path, profile: Path) -> None:
    """Open every tab on a run, and a sample with its tokens; do nothing without a browser."""
    if find_browser() is None:
        return
    with serve_runs(run_dir) as server, browse(profile) as browser:
        wait_for_index(server)
        page = open_view(browser, server)
        for tab in TABS:
            open_tab(page, tab)
        open_tab(page, "samples")
        page.run("document.getElementById('with_tokens').click()")
        page.wait("document.querySelector('tr.row td.end .faint')")
        page.run("document.querySelector('tr.row').click()")
        page.wait("document.querySelector('#tokens .token:not(.untrained)')")
        assert page.errors == []
        assert page.run("document.getElementById('state').textContent") == ""
