"""Runs one check, by its names, in a process of its own, and writes its outcome as JSON.

    python -m mcore_rl.tools.doctor.child <stage> <check>

The outcome goes to the file OUTCOME in the check's folder.

A check may crash its process, or leave a GPU's context broken, without harm to the next.
"""

import json
import sys

from mcore_rl.tools.doctor.check import (
    Check,
    Figures,
    MissedTargetError,
    SkipCheckError,
    find_own_folder,
)
from mcore_rl.tools.doctor.stages import find_check

OUTCOME = "outcome.json"


def main() -> None:
    stage, name = sys.argv[1:]
    outcome, why, figures = run(find_check(stage, name))
    told = json.dumps({"outcome": outcome, "why": why, "figures": figures})
    (find_own_folder() / OUTCOME).write_text(told)


def run(check: Check) -> tuple[str, str, Figures]:
    """Return outcome, reason and figures. Any other exception passes through as a failure."""
    try:
        return "ok", "", check.run()
    except SkipCheckError as reason:
        return "skipped", str(reason), {}
    except MissedTargetError as missed:
        return "failed", str(missed), missed.figures


if __name__ == "__main__":
    main()
