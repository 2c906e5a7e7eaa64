"""docs/cpu.md lists every patch and stand-in of the code, and nothing else."""

import re
from pathlib import Path

import pytest

from mcore_rl.device.cpu_patches import PATCHES
from mcore_rl.device.sglang_setup import STANDINS_DIR

DOCUMENT = Path("docs/cpu.md").read_text()


def names_in_table(heading: str) -> list[str]:
    """Return the first column of the table under a second-level heading."""
    section = re.split(r"(?m)^## ", DOCUMENT.split(f"\n## {heading}\n")[1])[0]
    return re.findall(r"(?m)^\| `(\w+)` \|", section)


def test_megatrons_patches_are_listed_in_order() -> None:
    assert names_in_table("Megatron: patches") == [patch.__name__ for patch in PATCHES]


def test_sglangs_patches_are_listed_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STANDINS_DIR)
    import sglang_on_cpu  # pyright: ignore[reportMissingImports]

    names = [patch.__name__ for patch in sglang_on_cpu.PATCHES]
    assert names_in_table("SGLang: patches") == names


def test_stand_in_packages_are_listed() -> None:
    folders = {file.parent.name for file in STANDINS_DIR.glob("*/__init__.py")}
    assert set(names_in_table("SGLang: stand-in packages")) == folders - {"sglang_on_cpu"}


def test_every_row_is_complete() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| `")]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4 and all(cells), row
