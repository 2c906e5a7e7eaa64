"""docs/cpu.md lists every stand-in of the code, and nothing else."""

import re
from pathlib import Path

from mcore_rl.device.sglang_setup import STANDINS_DIR

DOCUMENT = Path("docs/cpu.md").read_text()


def names_in_table(heading: str) -> list[str]:
    """Return the first column of the table under a second-level heading."""
    section = re.split(r"(?m)^## ", DOCUMENT.split(f"\n## {heading}\n")[1])[0]
    return re.findall(r"(?m)^\| `(\w+)` \|", section)


def test_stand_in_packages_are_listed() -> None:
    folders = {file.parent.name for file in STANDINS_DIR.glob("*/__init__.py")}
    assert set(names_in_table("SGLang: stand-in packages")) == folders - {"sglang_on_cpu"}


def test_every_row_is_complete() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| `")]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4 and all(cells), row
