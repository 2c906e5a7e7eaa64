"""Reserves a slot for each process of a run, given the sizes of its ranks and engines."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from mcore_rl.cluster.placement import (
    Slot,
    check_tensor_parallel,
    colocate_engines,
    colocate_ranks,
    divide,
    gpus_per_node,
    reserve,
)
from mcore_rl.config import ClusterConfig, RolloutConfig
from mcore_rl.planning.bundles import Bundle, plan_run
from mcore_rl.planning.run_size import RunSize


@dataclass(frozen=True)
class RunSlots:
    """The slots of each role.

    engines   for each engine of the policy, one slot per machine that it spans
    served    the same for each judge, reward model and teacher, by role
    """

    trainer: list[Slot]
    critic: list[Slot]
    engines: list[list[Slot]]
    served: dict[str, list[list[Slot]]]


def reserve_slots(
    size: RunSize, rollout: RolloutConfig, cluster: ClusterConfig, timeout_s: float
) -> RunSlots:
    """Reserve room for the processes; colocated ones share that of the trainer's ranks.

    Raises ValueError if there is not enough room after `timeout_s`, if colocated engines do not fit
    or if a tensor-parallel group would lie on two nodes.
    """
    bundles = plan_run(size, rollout, cluster, gpus_per_node())
    num_own = len(bundles.of_models)
    plans = [*bundles.of_models, *bundles.of_served]
    num_ranks = num_own - len(bundles.engines)  # plans of trainer and critic
    reserved = reserve(plans, timeout_s, spread=range(num_ranks, len(plans)))
    trainer = divide(reserved[0], size.tenants)
    critic = reserved[1]
    check_tensor_parallel(trainer, size.trainer_tp, "parallel.tp")
    check_tensor_parallel(critic, size.critic_tp, "critic.parallel.tp")
    engines = reserved[2:num_own]
    served = _by_role(bundles.served, iter(reserved[num_own:]))
    if size.critic_colocated:
        critic = colocate_ranks(trainer, size.critic)
    if size.engines_colocated:
        engines = colocate_engines(
            trainer, size.engines, rollout.engine_ranks, rollout.nodes_per_engine
        )
    for role, model in size.colocated_served.items():
        served[role] = colocate_engines(trainer, model.engines, model.engine_ranks, role=role)
    return RunSlots(trainer, critic, engines, served)


def _by_role(
    bundles: dict[str, list[list[Bundle]]], slots: Iterator[list[Slot]]
) -> dict[str, list[list[Slot]]]:
    """Hand out the slots in order, as many to each role as it has engines."""
    return {role: list(islice(slots, len(of_role))) for role, of_role in bundles.items()}
