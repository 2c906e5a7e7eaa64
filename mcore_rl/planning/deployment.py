"""A recipe and its model's config.json in, where both sides of its weight sync hold what, out."""

from dataclasses import dataclass

from mcore_rl.config import Config
from mcore_rl.slices.hf.facts import ModelFacts
from mcore_rl.slices.layouts.layout import Layout
from mcore_rl.slices.layouts.megatron import MegatronLayout, MegatronSizes
from mcore_rl.slices.layouts.recorded import RecordedLayouts
from mcore_rl.slices.layouts.sglang_models import SGLangSizes
from mcore_rl.slices.plan.shares import RegularHosts


@dataclass(frozen=True)
class Deployment:
    """Both sides of a recipe's weight sync.

    stage_ranks     trainer ranks that make a pipeline stage
    engine_ranks    of one engine
    relays          engines pass on what they get
    """

    source: MegatronLayout
    target: Layout
    hosts: RegularHosts
    stage_ranks: int
    engine_ranks: int
    relays: bool


def engine_sizes(config: Config) -> SGLangSizes:
    """Of the recipe's engines."""
    rollout = config.rollout
    return SGLangSizes(rollout.engines, rollout.tp, rollout.ep, rollout.pp, rollout.attention_dp)


def record_layouts(config: Config, policy: ModelFacts, engines: SGLangSizes) -> RecordedLayouts:
    """The layouts that Megatron and the given engines have in this recipe."""
    trainer = MegatronSizes.of(config.parallel, policy.config)
    fp8 = config.rollout.quantization == "fp8"
    return RecordedLayouts(policy.config, config.model.dtype, trainer, engines, fp8)


def make_deployment(config: Config, policy: ModelFacts) -> Deployment:
    """ValueError names the two sizes that do not divide."""
    rollout, per_host = config.rollout, config.plan.ranks_per_host
    recorded = record_layouts(config, policy, engine_sizes(config))
    source, target = recorded.source(), recorded.target()
    first_host = 0 if config.cluster.colocated else -(-source.num_ranks // per_host)
    hosts = RegularHosts(per_host, per_host, first_host)
    engine_ranks = target.num_ranks // rollout.engines
    return Deployment(
        source, target, hosts, recorded.trainer.stage_ranks, engine_ranks, relays(config)
    )


def relays(config: Config) -> bool:
    """Whether engines pass on what they get. Those on the trainer's hosts have near holders of their own."""
    return config.sync.relay and config.rollout.stage_weights and not config.cluster.colocated


def engine_links(config: Config) -> int:
    """Links of an engine rank, each with buffers: to the trainer, to the engines before and behind it."""
    return min(3, config.rollout.engines + 1) if relays(config) else 1
