"""Counts what a command needs of a cluster: ranks and engines, their Ray bundles, and nodes.

    recipe, command --> RunSize (ranks, engines) --> RunBundles --> NodeNeeds

A bundle is for one rank, or for an engine's ranks on one node.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.config import (
    ClusterConfig,
    Config,
    RolloutConfig,
    ServedModelConfig,
)

_REWARD_MODELS = ("judge", "reward_model")


@dataclass(frozen=True)
class CommandParts:
    """The parts of a recipe that a command starts; `served` are roles of served models."""

    trainer: bool = False
    engines: bool = False
    served: tuple[str, ...] = ()


COMMANDS = {
    "train": CommandParts(True, True, (*_REWARD_MODELS, "teacher")),
    "sft": CommandParts(trainer=True),
    "dpo": CommandParts(trainer=True),
    "pairs": CommandParts(engines=True, served=_REWARD_MODELS),
    "eval": CommandParts(engines=True, served=_REWARD_MODELS),
}


@dataclass(frozen=True)
class RunSize:
    """Numbers of ranks and engines of a command, and which share the trainer ranks' GPUs.

    ranks_per_engine   of the policy's engines
    """

    trainer: int
    critic: int
    engines: int
    served: Mapping[str, ServedModelConfig]
    engines_colocated: bool
    critic_colocated: bool
    trainer_tp: int = 1
    trainer_pp: int = 1
    critic_tp: int = 1
    critic_pp: int = 1
    ranks_per_engine: int = 1

    @staticmethod
    def make(config: Config, command: str) -> "RunSize":
        """The sizes that `command`, one of COMMANDS, needs of the recipe."""
        from mcore_rl.algo.lookup import needs_of  # imports torch, which cheap checks do without

        parts = COMMANDS[command]
        has_critic = command == "train" and needs_of(config.algorithm).critic
        return RunSize(
            trainer=config.parallel.world_size if parts.trainer else 0,
            critic=config.critic.parallel.world_size if has_critic else 0,
            engines=config.rollout.engines if parts.engines else 0,
            served={r: m for r, m in config.served_models.items() if r in parts.served},
            engines_colocated=config.cluster.colocated and parts.engines and parts.trainer,
            critic_colocated=config.critic.colocated and has_critic,
            trainer_tp=config.parallel.tp,
            trainer_pp=config.parallel.pp,
            critic_tp=config.critic.parallel.tp,
            critic_pp=config.critic.parallel.pp,
            ranks_per_engine=config.rollout.engine_ranks,
        )

    @property
    def tenants(self) -> int:
        """Processes that share the bundle of a trainer rank: its GPU and its CPUs."""
        return 1 + self.engines_colocated + self.critic_colocated + len(self.colocated_served)

    @property
    def colocated_served(self) -> dict[str, ServedModelConfig]:
        return {
            role: model
            for role, model in self.served.items()
            if model.is_colocated and self.trainer
        }

    @property
    def trainer_gpus(self) -> int:
        """GPUs of trainer and critic."""
        return self.trainer + (0 if self.critic_colocated else self.critic)

    @property
    def engine_gpus(self) -> int:
        """GPUs that the policy's engines have of their own."""
        return 0 if self.engines_colocated else self.engines * self.ranks_per_engine

    @property
    def num_gpus(self) -> int:
        """GPUs of trainer, critic and the policy's engines."""
        return self.trainer_gpus + self.engine_gpus

    @property
    def served_gpus(self) -> dict[str, int]:
        """GPUs of the models that are served on GPUs of their own, by role."""
        return {
            role: model.engine_ranks * model.engines
            for role, model in self.served.items()
            if role not in self.colocated_served and model.path
        }

    def list_gpus(self) -> dict[str, int]:
        """Return all GPUs of the command by the options that set them; a shared one counts once."""
        own = {
            "parallel": self.trainer,
            "critic.parallel": 0 if self.critic_colocated else self.critic,
            "rollout.engines": self.engine_gpus,
            **{f"{role}.engines": number for role, number in self.served_gpus.items()},
        }
        return {option: number for option, number in own.items() if number}

    def count_all_gpus(self) -> int:
        """Return the GPUs of the command, those of served models included."""
        return sum(self.list_gpus().values())

    def num_cpus(self, cpus_per_rank: float) -> float:
        """CPUs that the command reserves in Ray: those of a rank for each GPU."""
        return cpus_per_rank * self.count_all_gpus()


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
    def models(self) -> list[list[Bundle]]:
        """The plans of trainer, critic and engines, in this order."""
        return [self.trainer, self.critic, *self.engines]

    @property
    def served_engines(self) -> list[list[Bundle]]:
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
    return _separate_nodes(bundles) if cluster.separate_nodes else bundles


def _separate_nodes(bundles: RunBundles) -> RunBundles:
    def reserve_kind(kind: str, plan: list[Bundle]) -> list[Bundle]:
        return [{**bundle, kind: _NODE_SHARE} for bundle in plan]

    return RunBundles(
        reserve_kind(TRAINER_NODE, bundles.trainer),
        reserve_kind(TRAINER_NODE, bundles.critic),
        [reserve_kind(ENGINE_NODE, engine) for engine in bundles.engines],
        {
            role: [reserve_kind(ENGINE_NODE, engine) for engine in engines]
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


def plan_nodes(
    size: RunSize, rollout: RolloutConfig, cluster: ClusterConfig, node: NodeSize
) -> NodeNeeds:
    """The fewest nodes of that size that hold the processes of a run.

    Raises ValueError naming the recipe's options and the node's size if a process fits no node.
    """
    bundles = plan_run(size, rollout, cluster, node.gpus)
    trainer = [*bundles.trainer, *bundles.critic]
    engines = [bundle for engine in bundles.engines + bundles.served_engines for bundle in engine]
    if cluster.separate_nodes:
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
