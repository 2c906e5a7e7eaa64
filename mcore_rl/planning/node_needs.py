"""Counts the nodes that a command needs for a recipe, from the bundles of its ranks and engines.

Says in a sentence which servers a run starts on each node with engines.

Says how a recipe trains its critic: as the policy, but for the critic's own options.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_rl.config import Config, CriticConfig, SandboxConfig, SearchConfig, TrainConfig
from mcore_rl.planning.bundles import Bundle, plan_run
from mcore_rl.planning.run_size import RunSize


def explain_servers(sandbox: SandboxConfig, search: SearchConfig) -> str:
    """Return the servers and what they take besides the ranks' processors; empty: there is none."""
    parts = []
    if sandbox.is_used:
        parts.append(
            f"a sandbox of {sandbox.workers} programs at a time, {sandbox.memory_mib:,} MiB each"
            f" unless they ask for up to {sandbox.max_memory_mib:,}"
        )
    if search.is_used:
        parts.append(f"a search of {search.index} ({search.method}, {search.threads} threads)")
    if not parts:
        return ""
    return f"Servers, on each node with engines: {'; '.join(parts)}."


def critic_training(train: TrainConfig, critic: CriticConfig) -> TrainConfig:
    """Return `train` with the critic's own options for megatron-core on top of the policy's."""
    return replace(
        train,
        megatron={**train.megatron, **critic.megatron},
        ddp={**train.ddp, **critic.ddp},
    )


@dataclass(frozen=True)
class NodeSize:
    """A node of the cluster. `cpus` None: as many as its bundles ask for."""

    gpus: int
    cpus: int | None = None


@dataclass(frozen=True)
class NodeNeeds:
    """The nodes of a run, and what its fullest node must have.

    trainer_nodes   of these, the first ones, kept for trainer and critic; 0 if all share all nodes
    """

    nodes: int
    trainer_nodes: int
    gpus_per_node: int
    cpus_per_node: int

    @property
    def engine_nodes(self) -> int:
        """Nodes kept for engines; 0 if all share all nodes."""
        return self.nodes - self.trainer_nodes if self.trainer_nodes else 0


def plan_nodes(config: Config, command: str, node: NodeSize) -> NodeNeeds:
    """The fewest nodes of that size that hold the processes of `command`.

    Raises ValueError naming the recipe's options and the node's size if a process fits no node.
    """
    bundles = plan_run(RunSize.of(config, command), config.rollout, config.cluster, node.gpus)
    trainer = [*bundles.trainer, *bundles.critic]
    engines = [bundle for engine in bundles.engines + bundles.of_served for bundle in engine]
    if config.cluster.separate_nodes:
        filled = [*_fill_nodes(trainer, node), *_fill_nodes(engines, node)]
        trainer_nodes = len(_fill_nodes(trainer, node))
    else:
        filled = _fill_nodes([*trainer, *engines], node)
        trainer_nodes = 0
    cpus = math.ceil(max(sum(bundle["CPU"] for bundle in of_node) for of_node in filled))
    return NodeNeeds(len(filled), trainer_nodes, node.gpus, max(cpus, 1))


def _fill_nodes(bundles: Sequence[Bundle], node: NodeSize) -> list[list[Bundle]]:
    """Bundles by node: the largest first, each on the first node with room for it."""
    nodes: list[list[Bundle]] = []
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0), b["CPU"]), reverse=True):
        if not _fits([bundle], node):
            raise ValueError(
                f"a process needs {bundle['CPU']:g} CPUs and {bundle.get('GPU', 0):g} GPUs of one"
                f" node, which has {node.cpus} CPUs and {node.gpus} GPUs: lower"
                " cluster.cpus_per_rank, or the ranks of an engine on a node (rollout.tp,"
                " rollout.nodes_per_engine)"
            )
        room = next((n for n in nodes if _fits([*n, bundle], node)), None)
        if room is None:
            nodes.append([bundle])
        else:
            room.append(bundle)
    return nodes


def _fits(bundles: Sequence[Bundle], node: NodeSize) -> bool:
    gpus = sum(bundle.get("GPU", 0) for bundle in bundles)
    cpus = sum(bundle["CPU"] for bundle in bundles)
    return gpus <= node.gpus and (node.cpus is None or cpus <= node.cpus)
