"""Runs one check, by its names, in a process of its own, and writes its outcome as JSON.

    python -m mcore_rl.doctor.child <stage> <check> <file for the outcome>

A check may crash its process, or leave a GPU's context broken, without harm to the next.
"""

import json
import sys
from pathlib import Path

from mcore_rl.doctor.check import Check, Figures, MissedTarget, SkipCheck
from mcore_rl.doctor.stages import find_check


def main() -> None:
    stage, name, path = sys.argv[1:]
    outcome, why, figures = run(find_check(stage, name))
    Path(path).write_text(json.dumps({"outcome": outcome, "why": why, "figures": figures}))


def run(check: Check) -> tuple[str, str, Figures]:
    """Return outcome, reason and figures. Any other exception passes through as a failure."""
    try:
        return "ok", "", check.run()
    except SkipCheck as reason:
        return "skipped", str(reason), {}
    except MissedTarget as missed:
        return "failed", str(missed), missed.figures


if __name__ == "__main__":
    main()
