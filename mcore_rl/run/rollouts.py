"""Connects the collectors of a run, and gives the loop its ways to sample, to score and to read."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcore_rl.cluster.collectors import CollectorGroup
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.run import RunProcesses, experts_shape
from mcore_rl.config import Config, RewardConfig
from mcore_rl.data.decoding import make_decode
from mcore_rl.loops.roles import OnTokens, ReadSamples, Reward, ScoreLater
from mcore_rl.planning.host_memory import explain_servers
from mcore_rl.process.log_files import LogThrottle
from mcore_rl.process.redaction import list_secrets
from mcore_rl.rewards.make import make_scorer
from mcore_rl.rewards.scorer import LOGGED_ERRORS, log_failures
from mcore_rl.rollout.collector_pool import CollectorPool
from mcore_rl.run.episodes import check_episodes, episode_spec
from mcore_rl.run.images import patch_maker
from mcore_rl.run.node_servers import check_node_servers, node_servers_spec
from mcore_rl.types import Sample, StoredBatch, StoredSample, TokenWork, TrainBatch
from mcore_rl.types.scores import Scores
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.workers.collector_worker import CollectorSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollouts:
    """The collectors as the implementations of the loop's roles use them.

    reward             scores samples while ranks and engines are watched
    score_later        scores them beside other work, which is watched already
    fetch              brings a batch's tokens and images here
    teacher            has the stores keep a teacher's log-probs; None if the recipe has no teacher
    """

    client: CollectorPool
    reward: Reward
    score_later: ScoreLater
    read: ReadSamples
    fetch: Callable[[StoredBatch], TrainBatch]
    on_tokens: OnTokens
    teacher: Callable[[Sequence[StoredSample]], list[tuple[float, ...]]] | None


def collector_spec(
    config: Config, policy: ModelFacts, tokenizer: PreTrainedTokenizerBase
) -> CollectorSpec:
    """Return what each collector is built of.

    Raises ValueError if the tokenizer has no end-of-sequence token, or if rewards, environments or
    servers of the recipe cannot be used: their code is imported here, before a process starts.
    """
    check_node_servers(config)
    make_scorer(config)
    if config.agents.is_used:
        check_episodes(config, policy, tokenizer)
    stop = tokenizer.eos_token_id
    if not isinstance(stop, int):
        raise ValueError(
            f"the tokenizer in {config.model.path} has no eos_token: responses would never stop"
        )
    return CollectorSpec(
        config.rollout,
        (stop,),
        make_decode(tokenizer),
        experts_shape(config, policy),
        partial(make_scorer, config),
        episode_spec(config, policy, tokenizer) if config.agents.is_used else None,
        node_servers_spec(config),
        list_secrets(),
        patch_maker(config.data.images, policy),
    )


def connect_rollouts(config: Config, processes: RunProcesses, engines: EngineGroup) -> Rollouts:
    """Wait for engines, served models and collectors, and make them known to one another."""
    collectors = processes.collectors
    assert collectors is not None, "the command has no engines"
    served = processes.served_engines.wait_built()
    for role, model in served.items():
        _log.info("%s: %s at %s", role, model.model, ", ".join(map(str, model.engines)))
    collectors.connect(engines.wait_built(), served)
    if line := explain_servers(config.sandbox, config.search):
        _log.info(line)
    client = CollectorPool(
        collectors.list_calls(),
        collectors.engines_per_collector,
        engines.health,
        config.rollout.max_concurrency,
    )
    return _rollouts(config.reward, client, collectors, processes, "teacher" in served)


def _rollouts(
    config: RewardConfig,
    client: CollectorPool,
    collectors: CollectorGroup,
    processes: RunProcesses,
    has_teacher: bool,
) -> Rollouts:
    watched = processes.watched
    throttle = LogThrottle()
    """Scores come group by group where sampling goes on beside training."""

    async def score(samples: Sequence[StoredSample]) -> Scores:
        scores = await collectors.score(samples)
        pairs = zip(samples, scores.errors, strict=True)
        failed = [sample for sample, error in pairs if error]
        if failed and throttle.is_due(len(failed)):
            shown = await collectors.samples(failed[:LOGGED_ERRORS])
            log_failures(shown, scores.errors, config, throttle.describe_held())
        return scores

    def reward(samples: Sequence[StoredSample]) -> Scores:
        return watched(score(samples))

    def read(samples: Sequence[StoredSample]) -> list[Sample]:
        return watched(collectors.samples(samples))

    def fetch(batch: StoredBatch) -> TrainBatch:
        return collectors.stores.assemble(batch, with_pixels=True)

    def on_tokens(works: Sequence[tuple[TokenWork, Any]]) -> list[tuple[StoredBatch, Any]]:
        return watched(collectors.apply(works))

    def teacher(samples: Sequence[StoredSample]) -> list[tuple[float, ...]]:
        watched(collectors.ask_teacher(samples))
        return []

    return Rollouts(
        client,
        reward,
        score,
        read,
        fetch,
        on_tokens,
        teacher if has_teacher else None,
    )
