"""Sizes of ranks and engines in, Ray bundles out; each bundle hosts one process."""

from collections.abc import Mapping

from mcore_rl.config import ServedModelConfig

Bundle = Mapping[str, float]


def plan_ranks(num_ranks: int, cpus_per_rank: float, gpus_per_node: int) -> list[Bundle]:
    """One bundle per rank of trainer or critic, with one GPU where there are any."""
    return [make_bundle(cpus_per_rank, min(1, gpus_per_node))] * num_ranks


def plan_engine(
    num_ranks: int,
    cpus_per_rank: float,
    gpus_per_node: int,
    num_nodes: int = 0,
    role: str = "rollout",
) -> list[Bundle]:
    """One bundle per node that the engine spans, `num_nodes` or, for 0, as many as its GPUs fill.

    ValueError if its ranks fill no whole number of nodes, or more of each than there is; it names the options
    of `role`.
    """
    if not num_nodes and gpus_per_node:
        num_nodes = -(-num_ranks // gpus_per_node)
        if num_nodes > 1 and num_ranks % gpus_per_node:
            raise ValueError(
                f"{role}.tp * {role}.pp = {num_ranks} fills no whole number of nodes of {gpus_per_node}"
                " GPUs; take a multiple or less"
            )
    on_each = num_ranks // max(num_nodes, 1)
    if 0 < gpus_per_node < on_each:
        raise ValueError(
            f"{role}.nodes_per_engine={num_nodes} puts {on_each} ranks on a node, which has {gpus_per_node}"
            " GPUs; take more nodes, or 0"
        )
    return [make_bundle(cpus_per_rank * on_each, on_each if gpus_per_node else 0)] * max(
        num_nodes, 1
    )


def make_bundle(cpus: float, gpus: float) -> Bundle:
    """Resources as Ray names them; a bundle without GPUs asks for none."""
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def plan_served(
    configs: Mapping[str, ServedModelConfig], cpus_per_rank: float, gpus_per_node: int
) -> dict[str, list[list[Bundle]]]:
    """By role, the bundles of each engine; nothing for a server that runs already."""

    def of_role(role: str, config: ServedModelConfig) -> list[list[Bundle]]:
        return [
            plan_engine(config.engine_ranks, cpus_per_rank, gpus_per_node, role=role)
        ] * config.engines

    return {role: of_role(role, config) for role, config in configs.items() if config.path}
