"""A check's outcome is made of what it returns or raises."""

import pytest

from mcore_rl.tools.doctor.check import Check, Figures, MissedTargetError, SkipCheckError, expect
from mcore_rl.tools.doctor.runner import run


def good() -> Figures:
    return {"gb_per_s": 2.0}


def missed() -> Figures:
    raise MissedTargetError("3 kernels, target 2", {"kernels": 3})


def skipped() -> Figures:
    raise SkipCheckError("one GPU only")


def wrong() -> Figures:
    expect(True, "not shown")
    expect(False, "bits differ")
    return {}


def test_figures_targets_and_reasons_are_told() -> None:
    assert run(Check("a", good)) == ("ok", "", {"gb_per_s": 2.0})
    assert run(Check("a", missed)) == ("failed", "3 kernels, target 2", {"kernels": 3})
    assert run(Check("a", skipped)) == ("skipped", "one GPU only", {})


def test_anything_else_ends_the_process() -> None:
    with pytest.raises(AssertionError, match=r"^bits differ$"):
        run(Check("a", wrong))
