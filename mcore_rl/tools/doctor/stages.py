"""All stages of the doctor, in the order in which they run."""

from collections.abc import Sequence
from dataclasses import replace

from mcore_rl.tools.doctor.check import Check, Stage, make_full_name
from mcore_rl.tools.doctor.megatron_checks import MEGATRON, PROBES
from mcore_rl.tools.doctor.run_checks import RUN
from mcore_rl.tools.doctor.step_checks import STEP
from mcore_rl.tools.doctor.sync_checks import SYNC
from mcore_rl.tools.doctor.te_checks import TE

STAGES: tuple[Stage, ...] = (SYNC, PROBES, MEGATRON, TE, STEP, RUN)
_NAME_WIDTH = max(len(make_full_name(stage, check)) for stage in STAGES for check in stage.checks)


def choose_stages(stages: str, checks: str = "") -> tuple[Stage, ...]:
    """Return the listed stages, or the stages of listed checks with these checks alone.

    checks   each as <stage>:<check>, with spaces or underscores in the latter's name

    All stages are chosen if both lists are empty; the order is always that of STAGES. Raises
    ValueError naming a stage or check that there is not, or if both are given.
    """
    if stages and checks:
        raise ValueError(f"--stages={stages} and --checks={checks}: choose by one of them")
    if checks:
        return _choose_checks(checks)
    chosen = _split(stages)
    known = [stage.name for stage in STAGES]
    for name in chosen:
        if name not in known:
            raise ValueError(f"--stages={stages}: no stage {name!r}; there are {', '.join(known)}")
    return tuple(stage for stage in STAGES if stage.name in (chosen or known))


def _choose_checks(checks: str) -> tuple[Stage, ...]:
    chosen = [name.replace("_", " ") for name in _split(checks)]
    known = [make_full_name(stage, check) for stage in STAGES for check in stage.checks]
    for name in chosen:
        if name not in known:
            raise ValueError(f"--checks={checks}: no check {name!r}; there are {', '.join(known)}")
    parts = [
        replace(stage, checks=tuple(c for c in stage.checks if make_full_name(stage, c) in chosen))
        for stage in STAGES
    ]
    return tuple(stage for stage in parts if stage.checks)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def describe_checks(stages: Sequence[Stage]) -> str:
    """Return a line for each check: its name, the seconds that it may take, and what it shows."""
    lines = []
    total_s = 0.0
    for stage in stages:
        for check in stage.checks:
            text = (check.run.__doc__ or "").strip().splitlines()[0]
            needs = "  (needs a GPU)" if check.gpu else ""
            name = make_full_name(stage, check)
            lines.append(f"{name:{_NAME_WIDTH}} {check.deadline_s:4.0f} s  {text}{needs}")
            total_s += check.deadline_s
    return "\n".join([*lines, f"{len(lines)} checks, at most {total_s:.0f} s"])


def find_check(stage_name: str, check_name: str) -> Check:
    [check] = [
        check
        for stage in STAGES
        for check in stage.checks
        if (stage.name, check.name) == (stage_name, check_name)
    ]
    return check
