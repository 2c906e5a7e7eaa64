"""Runs the real loop, sampler, collectors and weight sync of a recipe in virtual time.

real        loops.rl.train, BackgroundSampler, CollectorPool, Collector, RolloutClient, EngineSync,
            SharedGpus, PackedStoredTrainer, Advantages, the plan of the sync
simulated   engines, ranks, links, rewards, failures

A log keeps what the loop logs, and which prompts each step trained on.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.lookup import needs_of
from mcore_rl.batches.stored_batch import home_of
from mcore_rl.config import Config
from mcore_rl.data.source import ShuffledStream
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.loops.rl import train
from mcore_rl.loops.roles import NO_RECOVERY, Critic, Recovery, Roles, in_turn
from mcore_rl.loops.sampling import SamplingOptions
from mcore_rl.planning.bundles import RunSize
from mcore_rl.rollout.collector_pool import CollectorPool
from mcore_rl.rollout.engine_health import EngineHealth
from mcore_rl.rollout.engine_spec import EngineAddress
from mcore_rl.run.roles.advantages import StoredAdvantages
from mcore_rl.run.roles.background import BackgroundSampler
from mcore_rl.run.roles.colocation import (
    CRITIC,
    TRAINER,
    EngineMemory,
    SharedGpus,
    SharingCritic,
    SharingTrainer,
)
from mcore_rl.run.roles.generator import EngineGenerator, rollout_of_evaluations
from mcore_rl.run.roles.parity_check import ParityCheck, make_probe
from mcore_rl.run.roles.trainer import PackedCritic, PackedStoredTrainer, Packing
from mcore_rl.run.roles.weight_sync import EngineSync
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.engine import SimulatedCollector, SimulatedEngine, SimulatedTransport
from mcore_rl.tools.simulate.placement import Failures, ProcessPlacement, SimulatedRecovery
from mcore_rl.tools.simulate.ranks import (
    SimulatedEngineMemory,
    SimulatedLinks,
    SimulatedModel,
    SimulatedParityCheck,
    SimulatedRanks,
    link_seconds_of,
)
from mcore_rl.tools.simulate.recovery_costs import RecoveryCosts
from mcore_rl.tools.simulate.virtual_time import VirtualTime, context_of
from mcore_rl.tools.simulate.workload import Workload
from mcore_rl.types import Prompt, StoredBatch, StoredColumn, StoredSample, WeightVersion
from mcore_rl.types.scores import Scores


class StepLog:
    """Plays roles.Log."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self._prompts: dict[int, Counter[int]] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self.steps.setdefault(step, {}).update(metrics)

    def log_samples(
        self, step: int, samples: Sequence[StoredSample], scores: Scores, split: str = "train"
    ) -> None:
        if split == "train":
            self._prompts[step] = Counter(sample.prompt.index for sample in samples)

    def go_back(self, step: int) -> None:
        """Forget the steps after `step`, which the run has to repeat."""
        for later in [number for number in self.steps if number > step]:
            del self.steps[later]
            self._prompts.pop(later, None)

    def list_unaccounted(self, stream: Mapping[str, Any], num_samples: int) -> list[int]:
        """Return prompts that were not trained on, with all their `num_samples` samples, as often
        as they were handed out, apart from those that are still open.

        `stream` is the state of the prompts' stream, which is not shuffled.
        """
        trained = sum(self._prompts.values(), Counter[int]())
        still_open = set(stream["open"])
        wanted: Counter[int] = Counter()
        for position in range(stream["position"]):
            wanted[position % stream["num_items"]] += num_samples * (position not in still_open)
        return [prompt for prompt, num in wanted.items() if trained[prompt] != num]


COLOCATED_CALL_S = 0.5
"""Seconds in which engines on shared GPUs give up their memory, or take it back."""


class _AfterOtherWork(StoredAdvantages):
    """Computes advantages after the seconds of all that is not simulated."""

    def __init__(self, other_s: float, clock: VirtualTime, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._other_s = other_s
        self._clock = clock

    def __call__(
        self, scores: Scores, samples: Sequence[StoredSample], batch: StoredBatch
    ) -> tuple[StoredBatch, dict[str, float]]:
        if self._other_s:
            self._clock.spend("not simulated", lambda: self._other_s)
        if self._advantages.need_tokens:
            parts = self._cut(batch, samples)
            made = self._on_tokens([(cast(Any, None), part.batch) for part in parts])[0][0]
            fields = {name: getattr(made, name) for name in ("advantages_T", "returns_T")}
            return replace(batch, **fields), {}
        return super().__call__(scores, samples, batch)


class SimulatedRun:
    """A run between two starts of its processes, from `start_step` on."""

    def __init__(
        self,
        config: Config,
        costs: RecipeCosts,
        clock: VirtualTime,
        draw: random.Random,
        start_step: int,
        folder: RunFolder,
        engine_losses_s: Sequence[float] = (),
    ) -> None:
        """`engine_losses_s`: seconds from the start at which engines are lost, besides failures."""
        self._config = config
        self._costs = costs
        self._clock = clock
        self._start_step = start_step
        self._folder = folder
        self._needs = needs_of(config.algorithm)
        self.workload = Workload(config.simulate, config.rollout.max_response_len, config.run.seed)
        size = RunSize.make(config, "train")
        self._placement = ProcessPlacement.make(
            clock.loop,
            size,
            config.rollout,
            config.cluster,
            config.simulate.cores,
            config.plan.ranks_per_host,
        )
        self.engines = self._make_engines()
        self._health = EngineHealth(list(self.engines))
        self.collectors, self._pool = self._make_pool()
        self.failures = self._make_failures(size, draw, engine_losses_s)
        clock.lost = self.failures.lost
        self._on_trainer = partial(clock.spend, on=self._placement.trainer)
        trainer = costs.trainer.with_slow_ranks(config.simulate)
        self.trainer = SimulatedRanks("trainer", trainer, self._on_trainer)
        self.critic = None
        if costs.critic is not None:
            critic = costs.critic.with_slow_ranks(config.simulate)
            on_critic = partial(clock.spend, on=self._placement.critic)
            self.critic = SimulatedRanks("critic", critic, on_critic)
        self._gpus = self._share_gpus()

    @property
    def num_nodes(self) -> int:
        return len(self._placement.nodes)

    @property
    def num_samples_lost(self) -> int:
        return self._pool.num_lost

    def train(self, prompts: ShuffledStream[Prompt], log: StepLog) -> None:
        """Run the loop to its end. Raises RunLostError if the run is lost before."""
        config = self._config
        weights = self.make_sync()
        weights.sync_first(WeightVersion(self._start_step), make_probe((), 0))
        with self._sample_in_background(prompts, weights) as background:
            packed = PackedStoredTrainer(
                self.trainer,
                self._folder,
                packing=Packing.from_config(
                    config.parallel, config.train, self._costs.trainer.flops
                ),
                temperature=config.rollout.temperature,
                checkpoint=config.checkpoint,
            )
            advantages = Advantages(config.algorithm, config.reward.part_weights)
            roles = Roles(
                prompts=prompts,
                held_out=[],
                generator=self.make_generator(weights),
                reward=lambda samples: self._clock.watch(self._score(samples)),
                advantages=_AfterOtherWork(
                    self._costs.other_s,
                    self._clock,
                    advantages,
                    self._note_tokens,
                    has_teacher=False,
                ),
                trainer=SharingTrainer(packed, self._gpus),
                weights=weights,
                log=log,
                background=background,
                on_tokens=self._note_tokens,
                critic=self._make_critic(),
                both=in_turn if config.critic.colocated else self._clock.both,
                recovery=self._make_recovery(weights),
            )
            train(config, roles, self._start_step)

    def _make_recovery(self, weights: EngineSync) -> Recovery:
        recovery = self._config.run.recovery
        if not recovery.is_used:
            return NO_RECOVERY
        costs = RecoveryCosts.predict(self._config, self._costs)
        return SimulatedRecovery(
            self._clock,
            self.failures,
            costs,
            weights.forget_links,
            is_beside_sampling=RunSize.make(self._config, "train").tenants == 1,
        )

    def make_generator(self, weights: EngineSync) -> EngineGenerator:
        """Return what draws samples, those of evaluations by their own options."""
        rollout = self._config.rollout
        own = rollout_of_evaluations(rollout, self._config.eval)
        watched = self._clock.watch
        return EngineGenerator(self._pool, rollout, watched, weights.revive, evaluation=own)

    def end(self) -> None:
        """End all tasks, as the end of the processes does."""
        self.failures.end()
        tasks = asyncio.all_tasks(self._clock.loop)
        if tasks:
            for task in tasks:
                task.cancel()
            self._clock.loop.run_until_complete(asyncio.wait(tasks))

    def _make_engines(self) -> dict[str, SimulatedEngine]:
        simulate = self._config.simulate
        num_engines = self._config.rollout.engines
        num_slow = round(simulate.slow_share * num_engines)
        version = WeightVersion(self._start_step)
        engines = {}
        for k in range(num_engines):
            speed = self._costs.engine
            if k < num_slow:
                speed = speed.slow_down(simulate.slowdown)
            url = f"http://engine-{k}"
            engines[url] = SimulatedEngine(
                self._clock.loop, url, speed, version, self._placement.engines[k]
            )
        return engines

    def _make_failures(
        self, size: RunSize, draw: random.Random, engine_losses_s: Sequence[float]
    ) -> Failures:
        config = self._config
        homes = (nodes[0] for nodes in self._placement.engine_nodes)
        by_node = zip(dict.fromkeys(homes), self.collectors, strict=True)
        recovery = config.run.recovery
        return Failures(
            self._clock.loop,
            config.rollout,
            config.simulate,
            self.engines,
            self._health,
            self._placement,
            dict(by_node),
            size.trainer_gpus,
            draw,
            recovery.limit_restarts(size.trainer + size.critic) if recovery.is_used else 0,
            engine_losses_s,
            in_turn=config.cluster.colocated,
        )

    def _make_pool(self) -> tuple[list[SimulatedCollector], CollectorPool]:
        """Return a collector for the engines of each node, and their pool."""
        config = self._config
        addresses = [
            EngineAddress(url, "simulated", number=k) for k, url in enumerate(self.engines)
        ]
        transport = SimulatedTransport(self.engines, self.workload)
        urls = list(self.engines)
        hosts = [[urls[k] for k in own] for own in self._placement.engines_by_collector()]
        collectors = [
            SimulatedCollector(self._clock.loop, config.rollout, addresses, own, transport)
            for own in hosts
        ]
        pool = CollectorPool(collectors, hosts, self._health, config.rollout.max_concurrency)
        return collectors, pool

    def _share_gpus(self) -> SharedGpus:
        config = self._config
        are_colocated = config.cluster.colocated
        memory = SimulatedEngineMemory(
            are_colocated=are_colocated, call_s=COLOCATED_CALL_S, engines=self.failures
        )
        gpus = SharedGpus(cast(EngineMemory, memory), self._clock.watch)
        if are_colocated and config.cluster.offload:
            gpus.add(TRAINER, SimulatedModel(self.trainer))
        if config.critic.colocated and config.cluster.offload and self.critic is not None:
            gpus.add(CRITIC, SimulatedModel(self.critic))
        return gpus

    def _make_critic(self) -> Critic | None:
        costs = self._costs.critic
        if self.critic is None or costs is None:
            return None
        config = self._config
        packing = Packing.from_config(config.critic.parallel, config.train, costs.flops)
        critic = PackedCritic(
            self.critic, self._folder, packing=packing, checkpoint=config.checkpoint
        )
        return SharingCritic(critic, self._gpus) if config.critic.colocated else critic

    def make_sync(self) -> EngineSync:
        costs = self._costs
        rollout = self._config.rollout
        ranks_per_link = self._config.parallel.world_size + rollout.engine_ranks
        links = SimulatedLinks(
            self.engines,
            costs.sync_s,
            costs.swap_s,
            costs.sync_bytes,
            staged=rollout.stage_weights,
            link_s=link_seconds_of(ranks_per_link),
            send=self._placement.trainer.work,
            waits=costs.of_idle,
            read_back_s=costs.read_back_s,
            verify_every=self._config.sync.reads_back_every,
        )

        async def look() -> None:
            """Do nothing: failures are noted as they happen."""

        busy = self.engines if costs.of_idle else None
        parity_check = cast(
            ParityCheck, SimulatedParityCheck(self._on_trainer, costs.parity_check_s, busy)
        )
        return EngineSync(
            *(links, parity_check, self._health, look, self._clock.watch, self._gpus),
            count_steps=lambda: 0,  # simulated weights have no bytes that could be the same
        )

    def _sample_in_background(self, prompts: ShuffledStream[Prompt], weights: EngineSync) -> Any:
        config = self._config
        if config.rollout.mode == "sync":
            return nullcontext()
        return BackgroundSampler(
            SamplingOptions.make(config.rollout, config.reward, config.algorithm),
            config.run.seed,
            WeightVersion(self._start_step),
            prompts,
            self._pool,
            self._score,
            self._clock.watch,
            cast(Any, self._clock.loop.create_task),
            weights.revive,
        )

    async def _score(self, samples: Sequence[StoredSample]) -> Scores:
        score = self._score_beside_engines(samples)
        return await self._clock.loop.create_task(score, context=context_of("collectors"))

    async def _score_beside_engines(self, samples: Sequence[StoredSample]) -> Scores:
        await asyncio.sleep(self._config.simulate.reward_s)
        scores = self.workload.scores(samples)
        parts = dict.fromkeys(self._config.reward.part_weights, scores.rewards_N)
        return replace(scores, parts=parts)

    def _note_tokens(self, works: Any) -> list[tuple[StoredBatch, Any]]:
        """Say that fields of tokens are set; implements OnTokens, whose numbers nobody reads.

        Each batch is computed in the collector that has most of its tokens, as in
        cluster.collectors; the step waits for the busiest collector.
        """
        seconds: dict[int, float] = {}
        for _, batch in works:
            home = home_of(batch)
            is_far_N = np.array(batch.store_N) != home
            num_far = int(np.array(batch.lens_N)[is_far_N].sum())
            own_s = self._costs.trainer.compute_advantages_s(sum(batch.lens_N), num_far)
            seconds[home] = seconds.get(home, 0.0) + own_s
        self._clock.spend("advantages of tokens", lambda: max(seconds.values()))
        advantages = StoredColumn("advantages")
        returns = StoredColumn("returns") if self._needs.critic else None
        return [
            (replace(batch, advantages_T=advantages, returns_T=returns), None) for _, batch in works
        ]
