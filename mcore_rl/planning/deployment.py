"""Finds the layouts of both sides of a recipe's weight sync."""

from dataclasses import dataclass

from mcore_rl.config import ClusterConfig, ParallelConfig, RolloutConfig, SyncConfig
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.low_precision import Quantization
from mcore_rl.weights.layouts.layout import Layout
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.plan.shares import RegularHosts


@dataclass(frozen=True)
class Deployment:
    """Both sides of a recipe's weight sync.

    source          what trainer ranks send of `trained`, what they hold
    stage_ranks     trainer ranks of one pipeline stage
    engine_ranks    ranks of one engine
    relays          whether engines pass weights on to one another
    """

    trained: MegatronLayout
    source: Layout
    target: Layout
    hosts: RegularHosts
    stage_ranks: int
    engine_ranks: int
    relays: bool


def record_layouts(
    policy: ModelFacts,
    dtype: str,
    parallel: ParallelConfig,
    engines: SGLangSizes,
    *,
    quantization: Quantization = "none",
) -> RecordedLayouts:
    """Return the layouts of trainer ranks in `dtype` and of engines.

    quantization   rollout.quantization
    """
    trainer = MegatronSizes.from_config(parallel, policy.config)
    return RecordedLayouts(policy.config, dtype, trainer, engines, quantization)


def choose_served(policy: ModelFacts, rollout: RolloutConfig) -> ModelFacts:
    """Return the policy as engines hold it: with the layer that they guess with, if they do."""
    return policy.choose_trained(float(rollout.speculate == "mtp"))


def make_deployment(run: PlannedRun) -> Deployment:
    """The recipe's deployment. Raises ValueError naming two sizes that do not divide."""
    per_host = run.plan.ranks_per_host
    rollout = run.rollout
    engines = SGLangSizes.from_config(rollout)
    policy = choose_served(run.models.policy, rollout)
    quantization = rollout.quantization
    recorded = record_layouts(policy, run.dtype, run.parallel, engines, quantization=quantization)
    source = recorded.source()
    target = recorded.target()
    first_host = 0 if run.cluster.colocated else -(-source.num_ranks // per_host)
    hosts = RegularHosts(per_host, per_host, first_host)
    engine_ranks = target.num_ranks // rollout.engines
    relays = does_relay(run.sync, rollout, run.cluster)
    trained = recorded.find_trained()
    return Deployment(
        trained, source, target, hosts, recorded.trainer.stage_ranks, engine_ranks, relays
    )


def does_relay(sync: SyncConfig, rollout: RolloutConfig, cluster: ClusterConfig) -> bool:
    """Return whether engines pass weights on to one another.

    Colocated engines do not: they run on the trainer's hosts, where the weights are near anyway.
    """
    return sync.relay and rollout.stage_weights and not cluster.colocated


def count_engine_links(num_engines: int, relays: bool) -> int:
    """Links of an engine rank: to the trainer and, with relay, to its two neighbor engines."""
    return min(3, num_engines + 1) if relays else 1
