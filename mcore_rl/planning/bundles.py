"""Turns numbers of ranks and engines into Ray bundles: one per rank, or per node of an engine."""

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rl.config import ClusterConfig, RolloutConfig, ServedModelConfig
from mcore_rl.planning.run_size import RunSize

Bundle = Mapping[str, float]
TRAINER_NODE = "trainer_node"
ENGINE_NODE = "engine_node"
"""Ray resources of the nodes of each kind, where cluster.separate_nodes keeps them apart."""
_NODE_SHARE = 0.001
"""A bundle takes so much of the one that a node has."""


@dataclass(frozen=True)
class RunBundles:
    """The bundles of each role, without those that share the trainer ranks'.

    engines   for each engine of the policy, one bundle per node that it spans
    served    the same for each judge, reward model and teacher, by role
    """

    trainer: list[Bundle]
    critic: list[Bundle]
    engines: list[list[Bundle]]
    served: dict[str, list[list[Bundle]]]

    @property
    def of_models(self) -> list[list[Bundle]]:
        """The plans of trainer, critic and engines, in this order."""
        return [self.trainer, self.critic, *self.engines]

    @property
    def of_served(self) -> list[list[Bundle]]:
        return [engine for engines in self.served.values() for engine in engines]


def plan_run(
    size: RunSize, rollout: RolloutConfig, cluster: ClusterConfig, gpus_per_node: int
) -> RunBundles:
    """The bundles of a run. Raises ValueError as `plan_engine` does."""
    cpus = cluster.cpus_per_rank
    engine = plan_engine(rollout.engine_ranks, cpus, gpus_per_node, rollout.nodes_per_engine)
    own = {role: model for role, model in size.served.items() if role not in size.colocated_served}
    bundles = RunBundles(
        plan_ranks(size.trainer, cpus, gpus_per_node),
        plan_ranks(0 if size.critic_colocated else size.critic, cpus, gpus_per_node),
        [engine] * (0 if size.engines_colocated else size.engines),
        plan_served(own, cpus, gpus_per_node),
    )
    return _on_nodes_of_their_own(bundles) if cluster.separate_nodes else bundles


def _on_nodes_of_their_own(bundles: RunBundles) -> RunBundles:
    def on(kind: str, plan: list[Bundle]) -> list[Bundle]:
        return [{**bundle, kind: _NODE_SHARE} for bundle in plan]

    return RunBundles(
        on(TRAINER_NODE, bundles.trainer),
        on(TRAINER_NODE, bundles.critic),
        [on(ENGINE_NODE, engine) for engine in bundles.engines],
        {
            role: [on(ENGINE_NODE, engine) for engine in engines]
            for role, engines in bundles.served.items()
        },
    )


def plan_ranks(num_ranks: int, cpus_per_rank: float, gpus_per_node: int) -> list[Bundle]:
    """One bundle per rank of trainer or critic, with one GPU if nodes have GPUs."""
    return [make_bundle(cpus_per_rank, min(1, gpus_per_node))] * num_ranks


def plan_engine(
    num_ranks: int,
    cpus_per_rank: float,
    gpus_per_node: int,
    num_nodes: int = 0,
    role: str = "rollout",
) -> list[Bundle]:
    """One bundle per node that an engine spans: `num_nodes`, or for 0 as many as its GPUs fill.

    Raises ValueError naming the options of `role` if the ranks fill no whole number of nodes, or
    need more GPUs of a node than it has.
    """
    if not num_nodes and gpus_per_node:
        num_nodes = -(-num_ranks // gpus_per_node)
        if num_nodes > 1 and num_ranks % gpus_per_node:
            raise ValueError(
                f"{role}.tp * {role}.pp = {num_ranks} fills no whole number of nodes of"
                f" {gpus_per_node} GPUs; take a multiple or less"
            )
    ranks_per_node = num_ranks // max(num_nodes, 1)
    if 0 < gpus_per_node < ranks_per_node:
        raise ValueError(
            f"{role}.nodes_per_engine={num_nodes} puts {ranks_per_node} ranks on a node, which has"
            f" {gpus_per_node} GPUs; take more nodes, or 0"
        )
    bundle = make_bundle(cpus_per_rank * ranks_per_node, ranks_per_node if gpus_per_node else 0)
    return [bundle] * max(num_nodes, 1)


def make_bundle(cpus: float, gpus: float) -> Bundle:
    """Resources as Ray names them; a bundle without GPUs does not mention them."""
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def plan_served(
    configs: Mapping[str, ServedModelConfig], cpus_per_rank: float, gpus_per_node: int
) -> dict[str, list[list[Bundle]]]:
    """Bundles of each engine by role; a server that runs already (at a url) has no entry."""
    bundles: dict[str, list[list[Bundle]]] = {}
    for role, config in configs.items():
        if config.path:
            engine = plan_engine(config.engine_ranks, cpus_per_rank, gpus_per_node, role=role)
            bundles[role] = [engine] * config.engines
    return bundles
