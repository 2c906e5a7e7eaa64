"""Draws two tabs of the page of `mcore-rl view`: `make view-picture`.

python -m tests.support.view_picture runs/quickstart_seed0 docs

run folder --> view.png: samples that subtract, and the tokens of a wrong one; view_curves.png
"""

import sys
import tempfile
from pathlib import Path

from tests.support.browser import Browser, Page, find_browser, start_browser
from tests.support.pages import fill_in, open_tab, open_view, serve_runs, wait_for_index

WIDTH = 1280
SUBTRACTION = "takes out"
"""Words of the problems in which the warm start adds instead."""


def draw_pictures(run_dir: Path, folder: Path) -> None:
    """Write both pictures of a run of the quickstart. Raises ValueError without a Chromium."""
    executable = find_browser()
    if executable is None:
        raise ValueError("there is no Chromium: apt-get install chromium")
    with (
        tempfile.TemporaryDirectory() as profile,
        start_browser(executable, Path(profile)) as found,
    ):
        _draw(found, run_dir, folder)


def _draw(browser: Browser, run_dir: Path, folder: Path) -> None:
    with serve_runs(run_dir) as server:
        wait_for_index(server)
        page = open_view(browser, server)
        page.resize(WIDTH, 760)
        page.wait("document.querySelector('canvas')?.width > 300")
        _settle(page)
        page.take_picture(folder / "view_curves.png")
        _choose_sample(page)
        page.resize(WIDTH, 620)
        _settle(page)
        page.take_picture(folder / "view.png")


def _choose_sample(page: Page) -> None:
    """Show samples of the first steps whose tokens were logged, and the first that is wrong."""
    open_tab(page, "samples")
    page.run("document.getElementById('with_tokens').click()")
    fill_in(page, {"text": SUBTRACTION, "first_step": "1", "last_step": "12"})
    wrong = "[...document.querySelectorAll('tr.row')].find((e) => e.cells[2].textContent === '0')"
    page.wait(f"document.getElementById('text').value && {wrong}?.cells[0].textContent <= 12")
    page.run(f"{wrong}.click()")
    page.wait("document.querySelector('#tokens .token:not(.untrained)')")


def _settle(page: Page) -> None:
    """Return once the page is drawn in its size."""
    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    page.run(f"{frame}.then(() => true)")


if __name__ == "__main__":
    draw_pictures(Path(sys.argv[1]), Path(sys.argv[2]))
