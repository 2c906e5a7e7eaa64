"""Connects the collectors of a run, which draw, score and store the loop's samples."""

import logging
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from mcore_rl.batches.group_files import GroupFile
from mcore_rl.cluster.collectors import CollectorGroup
from mcore_rl.cluster.engine_specs import find_experts_shape, find_indexer_shape
from mcore_rl.cluster.engines import EngineGroup
from mcore_rl.cluster.run import RunProcesses
from mcore_rl.config import Config, EvalConfig, RewardConfig, RolloutConfig
from mcore_rl.data.decoding import make_decode
from mcore_rl.logs.episode_log import EpisodeLog
from mcore_rl.logs.ledger.ledger import RunLedger
from mcore_rl.logs.progress import tell_stage
from mcore_rl.loops.roles import NO_RECOVERY, Recovery, Watched
from mcore_rl.process.log_files import LogThrottle
from mcore_rl.process.lost_samples import SamplesLostError
from mcore_rl.process.redaction import list_secrets
from mcore_rl.rewards.make import make_scorer
from mcore_rl.rewards.scorer import LOGGED_ERRORS, log_failures
from mcore_rl.rollout.collector_pool import CollectorPool
from mcore_rl.run.episodes import (
    check_episodes,
    check_search,
    episode_spec,
    node_servers_spec,
    stand_in_urls,
)
from mcore_rl.run.images import patch_maker
from mcore_rl.run.roles.generator import EngineGenerator, rollout_of_evaluations
from mcore_rl.types import GroupLease, Sample, StoredBatch, StoredSample, TokenWork, TrainBatch
from mcore_rl.types.scores import Scores
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.workers.collector_worker import CollectorSpec
from mcore_rl.workers.episodes import EpisodeSpec

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Rollouts:
    """The collectors of a run, as the loop calls them; ranks and engines are watched meanwhile.

    client        draws samples
    has_teacher   whether the recipe has a teacher to ask
    ledger        gets samples and their scores
    """

    def __init__(
        self,
        client: CollectorPool,
        collectors: CollectorGroup,
        watched: Watched,
        config: RewardConfig,
        *,
        has_teacher: bool,
        ledger: RunLedger | None = None,
    ) -> None:
        self.client = client
        self.ledger = ledger or RunLedger()
        self.has_teacher = has_teacher
        self._collectors = collectors
        self._watched = watched
        self._config = config
        self._throttle = LogThrottle()
        """Scores come group by group where sampling goes on beside training."""

    def make_generator(
        self,
        rollout: RolloutConfig,
        evaluation: EvalConfig,
        episodes: EpisodeLog,
        revive: Callable[[], Awaitable[bool]] | None = None,
        recovery: Recovery = NO_RECOVERY,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> EngineGenerator:
        """Return what draws samples of training and of evaluations; see EngineGenerator."""
        own = rollout_of_evaluations(rollout, evaluation)
        how = revive, episodes, own, recovery, prepare
        return EngineGenerator(self.client, rollout, self._watched, *how)

    def reward(self, samples: Sequence[StoredSample]) -> Scores:
        """Return the scores of samples; implements roles.Reward."""
        return self._watched(self.score(samples))

    async def score(self, samples: Sequence[StoredSample]) -> Scores:
        """Return the scores of samples, on an event loop whose work is watched already."""
        self.ledger.note_sampled(samples)
        try:
            scores = await self._collectors.score(samples)
        except SamplesLostError as lost:
            self.ledger.note_lost(s for s in samples if s.lease.store in lost.stores)
            raise
        self.ledger.note_scored(samples, scores)
        pairs = zip(samples, scores.errors, strict=True)
        failed = [sample for sample, error in pairs if error]
        if failed and self._throttle.is_due(len(failed)):
            shown = await self._collectors.samples(failed[:LOGGED_ERRORS])
            log_failures(shown, scores.errors, self._config, self._throttle.describe_held())
        return scores

    async def write_groups(
        self, folder: Path, leases: Sequence[GroupLease]
    ) -> Mapping[int, GroupFile]:
        """Have the stores write groups to files in a folder; return the file of each store."""
        groups: dict[int, list[int]] = defaultdict(list)
        for lease in leases:
            groups[lease.store].append(lease.group)
        return await self._collectors.write_groups(folder, groups)

    async def read_groups(
        self, folder: Path, file: GroupFile, numbers: Sequence[int]
    ) -> Mapping[int, GroupLease]:
        """Have a store take the groups of a file; return where they are now, by their old numbers.

        Files are spread over the stores, as there may be fewer now.
        """
        num_stores = len(self._collectors.engines_of)
        store = zlib.crc32(file.name.encode()) % num_stores
        leases = {number: self.client.adopt(store) for number in numbers}
        places = {number: lease.group for number, lease in leases.items()}
        await self._collectors.read_groups(store, folder, file, places)
        return leases

    def read(self, samples: Sequence[StoredSample]) -> list[Sample]:
        """Bring samples here."""
        return self._watched(self._collectors.samples(samples))

    def fetch(self, batch: StoredBatch) -> TrainBatch:
        """Bring the tokens and images of a batch here."""
        return self._collectors.stores.assemble(batch, with_pixels=True)

    def apply(
        self, works: Sequence[tuple[TokenWork[T], StoredBatch]]
    ) -> list[tuple[StoredBatch, T]]:
        """Call functions where the tokens of their batches are; implements roles.OnTokens."""
        return self._watched(self._collectors.apply(works))

    def ask_teacher(self, samples: Sequence[StoredSample]) -> None:
        """Have the stores keep the teacher's log-probs of samples."""
        self._watched(self._collectors.ask_teacher(samples))


def collector_spec(
    config: Config,
    policy: ModelFacts,
    tokenizer: PreTrainedTokenizerBase,
    adapters: tuple[str, ...] = (),
) -> CollectorSpec:
    """Return the specification from which each collector is built.

    adapters   names of the policy and of what engines serve beside it; empty: nothing
    Raises ValueError if the tokenizer has no end-of-sequence token, or if rewards, environments or
    servers of the recipe cannot be used: their code is imported here, before a process starts.
    """
    check_search(config.search, config.cluster)
    make_run_scorer = partial(
        make_scorer,
        config.reward,
        config.rollout.max_response_len,
        config.served_models,
        trust_remote_code=config.model.trust_remote_code,
        has_environment=config.agents.is_used,
    )
    make_run_scorer()
    episodes = _make_episodes(config, policy, tokenizer, adapters)
    stop = tokenizer.eos_token_id
    if not isinstance(stop, int):
        raise ValueError(
            f"the tokenizer in {config.model.path} has no eos_token: responses would never stop"
        )
    return CollectorSpec(
        config.rollout,
        (stop,),
        make_decode(tokenizer),
        find_experts_shape(config.drift, policy),
        make_run_scorer,
        episodes,
        node_servers_spec(config.run, config.sandbox, config.search),
        list_secrets(),
        patch_maker(config.data.images, policy),
        find_indexer_shape(config.drift, policy),
    )


def _make_episodes(
    config: Config,
    policy: ModelFacts,
    tokenizer: PreTrainedTokenizerBase,
    adapters: tuple[str, ...],
) -> EpisodeSpec | None:
    """Return the specification of checked episodes; None: a sample is one response."""
    if not config.agents.is_used:
        return None
    spec = episode_spec(
        config.agents,
        config.model,
        config.data,
        config.rollout.max_response_len,
        config.run.dir,
        policy,
        tokenizer,
        adapters,
    )
    urls = stand_in_urls(config.sandbox, config.search)
    check_episodes(spec, tokenizer, config.teacher, urls)
    return spec


def connect_rollouts(
    processes: RunProcesses,
    engines: EngineGroup,
    rollout: RolloutConfig,
    reward: RewardConfig,
    ledger: RunLedger | None = None,
) -> Rollouts:
    """Wait for engines, served models and collectors; tell collectors the addresses of both.

    ledger   gets samples and their scores
    """
    collectors = processes.collectors
    assert collectors is not None, "the command has no engines"
    with tell_stage("start-up: engines and collectors", is_told=True):
        served = processes.served_engines.wait_built()
        collectors.connect(engines.wait_built(), served)
    engines.find_home = collectors.find_home
    for role, model in served.items():
        _log.info("%s: %s at %s", role, model.model, ", ".join(map(str, model.engines)))
    client = CollectorPool(
        collectors.list_calls(),
        collectors.engines_of,
        engines.health,
        rollout.max_concurrency,
    )
    return Rollouts(
        client,
        collectors,
        processes.run_sampling,
        reward,
        has_teacher="teacher" in served,
        ledger=ledger,
    )
