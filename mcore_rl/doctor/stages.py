"""All stages of the doctor, in the order in which they run."""

from mcore_rl.doctor.check import Check, Stage
from mcore_rl.doctor.megatron_checks import MEGATRON
from mcore_rl.doctor.probe_checks import PROBES
from mcore_rl.doctor.run_checks import RUN
from mcore_rl.doctor.step_checks import STEP
from mcore_rl.doctor.sync_checks import SYNC
from mcore_rl.doctor.te_checks import TE

STAGES: tuple[Stage, ...] = (SYNC, PROBES, MEGATRON, TE, STEP, RUN)


def choose_stages(names: str) -> tuple[Stage, ...]:
    """Return the stages of a comma-separated list, in their order; all for an empty one.

    Raises ValueError naming a stage that there is not.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    known = [stage.name for stage in STAGES]
    for name in chosen:
        if name not in known:
            raise ValueError(f"--stages={names}: no stage {name!r}; there are {', '.join(known)}")
    return tuple(stage for stage in STAGES if stage.name in (chosen or known))


def find_check(stage_name: str, check_name: str) -> Check:
    [check] = [
        check
        for stage in STAGES
        for check in stage.checks
        if (stage.name, check.name) == (stage_name, check_name)
    ]
    return check
