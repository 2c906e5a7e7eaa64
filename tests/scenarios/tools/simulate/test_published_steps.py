"""The table of published and simulated step times in docs/simulate.md is the one that is made."""

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.support.policy import ROOT

NAME = "benchmarks_published_steps"
FAST = ("DeepSeek-V3, on policy",)
"""A row of a second or two; the others take up to ten."""


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, ROOT / "benchmarks/published_steps.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written_lines(steps: ModuleType) -> list[str]:
    _, section, _ = steps.split_document(steps.DOCUMENT.read_text())
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return lines[1:]


def test_the_section_is_what_make_published_steps_writes(steps: ModuleType) -> None:
    _, section, _ = steps.split_document(steps.DOCUMENT.read_text())
    lines = written_lines(steps)
    assert section == steps.make_section(lines)
    for row, line in zip(steps.ROWS, lines, strict=True):
        simulated_s = float(line.split("|")[-3].replace(" s", ""))
        assert line == steps.table_row(row, simulated_s)


def test_status_md_has_the_same_range(steps: ModuleType) -> None:
    ratios = [steps.ratio_of(line) for line in written_lines(steps)]
    claim = f"take {min(ratios):.2f} to {max(ratios):.2f} of the times that are published"
    assert claim in " ".join((ROOT / "docs/status.md").read_text().split())


@pytest.mark.parametrize("name", FAST)
def test_a_row_is_what_is_simulated_today(steps: ModuleType, name: str) -> None:
    check_row(steps, name)


@pytest.mark.slow
def test_every_row_is_what_is_simulated_today(steps: ModuleType) -> None:
    for row in steps.ROWS:
        if row.name not in FAST:
            check_row(steps, row.name)


def check_row(steps: ModuleType, name: str) -> None:
    [(row, line)] = [
        (row, line)
        for row, line in zip(steps.ROWS, written_lines(steps), strict=True)
        if row.name == name
    ]
    assert line == steps.table_row(row, steps.simulate_row(row)), "make published-steps"
