"""docs/versions.md names the versions that the locks name."""

import re

from tests.support.versions_page import PAGE, ROWS, format_row


def test_the_page_is_current() -> None:
    lines = PAGE.read_text().splitlines(keepends=True)
    rows = {
        line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")
    }
    for row in ROWS:
        line = rows[row.name]
        newest = line.split(" | ")[3]
        assert re.fullmatch(r"\d[\w.]*", newest)
        assert line == format_row(row, newest), "run `make versions`"
