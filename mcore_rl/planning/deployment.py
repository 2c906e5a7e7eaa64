"""Finds the layouts of both sides of a recipe's weight sync."""

from dataclasses import dataclass

from mcore_rl.config import Config
from mcore_rl.weights.hf.facts import ModelFacts
from mcore_rl.weights.layouts.layout import Layout
from mcore_rl.weights.layouts.listed import RecordedLayouts
from mcore_rl.weights.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.weights.layouts.sglang_models import SGLangSizes
from mcore_rl.weights.plan.shares import RegularHosts


@dataclass(frozen=True)
class Deployment:
    """Both sides of a recipe's weight sync.

    stage_ranks     trainer ranks of one pipeline stage
    engine_ranks    ranks of one engine
    relays          whether engines pass weights on to one another
    """

    source: MegatronLayout
    target: Layout
    hosts: RegularHosts
    stage_ranks: int
    engine_ranks: int
    relays: bool


def record_layouts(config: Config, policy: ModelFacts, engines: SGLangSizes) -> RecordedLayouts:
    """The layouts that Megatron and the given engines have in this recipe."""
    trainer = MegatronSizes.of(config.parallel, policy.config)
    fp8 = config.rollout.quantization == "fp8"
    return RecordedLayouts(policy.config, config.model.dtype, trainer, engines, fp8)


def make_deployment(config: Config, policy: ModelFacts) -> Deployment:
    """The recipe's deployment. Raises ValueError naming two sizes that do not divide."""
    per_host = config.plan.ranks_per_host
    recorded = record_layouts(config, policy, SGLangSizes.of(config.rollout))
    source = recorded.source()
    target = recorded.target()
    first_host = 0 if config.cluster.colocated else -(-source.num_ranks // per_host)
    hosts = RegularHosts(per_host, per_host, first_host)
    engine_ranks = target.num_ranks // config.rollout.engines
    return Deployment(
        source, target, hosts, recorded.trainer.stage_ranks, engine_ranks, does_relay(config)
    )


def does_relay(config: Config) -> bool:
    """Return whether engines pass weights on to one another.

    Colocated engines do not: they run on the trainer's hosts, where the weights are near anyway.
    """
    return config.sync.relay and config.rollout.stage_weights and not config.cluster.colocated


def count_engine_links(num_engines: int, relays: bool) -> int:
    """Links of an engine rank: to the trainer and, with relay, to its two neighbor engines."""
    return min(3, num_engines + 1) if relays else 1
