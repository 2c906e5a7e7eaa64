"""Turns numbers of ranks and engines into Ray bundles: one per rank, or per node of an engine."""

from collections.abc import Mapping

from mcore_rl.config import ServedModelConfig

Bundle = Mapping[str, float]


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
