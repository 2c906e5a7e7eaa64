"""Predicts the memory of the smallest layout in which run.recovery.min_dp lets a run go on."""

from dataclasses import replace

from mcore_rl.config import ParallelConfig
from mcore_rl.config.run import RecoveryConfig
from mcore_rl.planning.host_memory import GIB
from mcore_rl.planning.kept_state import predict_kept_states
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.verdict import judge
from mcore_rl.process.kept_memory import NUM_COPIES


def explain_smallest(run: PlannedRun, recovery: RecoveryConfig) -> str:
    """Return a sentence on the ranks of the smallest layout; "" if the run may not become smaller.

    Their shares of the optimizer are larger, on the GPU and in the host memory of states.
    """
    if recovery.min_dp is None:
        return ""
    smallest = replace(run, parallel=_find_smallest(run.parallel, recovery.min_dp, "parallel"))
    if run.critic is not None:
        parallel = _find_smallest(run.critic.parallel, recovery.min_dp, "critic.parallel")
        smallest = replace(smallest, critic=replace(run.critic, parallel=parallel))
    _, sentence = judge(run.plan, predict_memory(smallest, "trainer"))
    kept = predict_kept_states(smallest, recovery)
    host = NUM_COPIES * max(state.rank_bytes for state in kept) / GIB
    return (
        f"With run.recovery.min_dp={recovery.min_dp}, a run that lost nodes may go on with"
        f" parallel.dp={smallest.parallel.dp_size}, each rank with {host:.1f} GiB of states in host"
        f" memory; this {sentence}"
    )


def _find_smallest(parallel: ParallelConfig, min_dp: int, group: str) -> ParallelConfig:
    """Return the layout of the smallest legal data-parallel size from `min_dp` on."""
    for dp in range(min_dp, parallel.dp_size):
        smaller = replace(parallel, dp=dp)
        try:
            smaller.check(group)
        except ValueError:
            continue
        return smaller
    return parallel
